# The gateway: HTTP on port 8000; /health, /ready and /metrics, without key or TLS, on 9100. No torch, compiler or pip in the image.
ARG PYTHON=python:3.11-slim

FROM ${PYTHON} AS packages
COPY docker/requirements-gateway.txt /tmp/requirements.txt
RUN python -m venv --without-pip /opt/quire \
 && python -m pip --python /opt/quire/bin/python install --no-cache-dir --disable-pip-version-check --no-deps -r /tmp/requirements.txt

FROM ${PYTHON}
# Mount points belong to the user that the processes run as, so that new volumes do too.
RUN groupadd --gid 10001 quire && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /cache quire \
 && install -d -o 10001 -g 10001 -m 0750 /cache /models && install -d -o 10001 -g 10001 -m 0700 /keys
COPY --from=packages /opt/quire /opt/quire
WORKDIR /app
COPY shared shared
COPY gateway gateway
ENV PATH=/opt/quire/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    QUIRE_HOST=0.0.0.0 QUIRE_PORT=8000 QUIRE_METRICS_HOST=0.0.0.0 QUIRE_METRICS_PORT=9100 \
    QUIRE_CACHE_DIR=/cache QUIRE_LOG_JSON=true
USER 10001:10001
EXPOSE 8000 9100
HEALTHCHECK --interval=5s --timeout=4s --start-period=60s --retries=3 \
    CMD ["python", "-m", "shared.probe", "9100", "/health"]
ENTRYPOINT ["python", "-m", "gateway"]
