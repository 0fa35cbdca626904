# A worker: one GPU (VARIANT=cuda, the default) or the CPU (VARIANT=cpu). /metrics and /ready on 9100. It also fetches and converts models
# (python -m shared.fetch). The NVIDIA driver comes from the host (container toolkit); CUDA's libraries come with torch.
ARG PYTHON=python:3.11-slim

FROM ${PYTHON} AS packages
ARG VARIANT=cuda
ARG TORCH=torch==2.13.0
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
COPY docker/requirements-worker.txt /tmp/requirements.txt
# torch first and alone, in a layer that a change of any other version leaves as it is.
RUN case "$VARIANT" in cuda) set -- ;; cpu) set -- ${TORCH_CPU_INDEX:+--extra-index-url "$TORCH_CPU_INDEX"} ;; \
      *) echo "VARIANT is cuda or cpu, not $VARIANT" >&2; exit 1 ;; esac \
 && python -m venv --without-pip /opt/torch \
 && python -m pip --python /opt/torch/bin/python install --no-cache-dir --disable-pip-version-check \
      --constraint /tmp/requirements.txt "$@" "$TORCH"
RUN python -m pip --python /opt/torch/bin/python install --no-cache-dir --disable-pip-version-check --no-deps \
      --target /opt/packages -r /tmp/requirements.txt

FROM ${PYTHON}
ARG VARIANT=cuda
# Triton compiles its launchers with the system's C compiler.
# hadolint ignore=DL3008
RUN if [ "$VARIANT" = cuda ]; then apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*; fi
# Mount points belong to the user that the processes run as, so that new volumes do too.
RUN groupadd --gid 10001 quire && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /cache quire \
 && install -d -o 10001 -g 10001 -m 0750 /cache /models && install -d -o 10001 -g 10001 -m 0700 /keys
COPY --from=packages /opt/torch /opt/torch
COPY --from=packages /opt/packages /opt/packages
WORKDIR /app
COPY shared shared
COPY gpu_worker gpu_worker
ENV PATH=/opt/torch/bin:$PATH PYTHONPATH=/opt/packages PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    QUIRE_METRICS_HOST=0.0.0.0 QUIRE_METRICS_PORT=9100 QUIRE_CACHE_DIR=/cache QUIRE_LOG_JSON=true \
    TRITON_CACHE_DIR=/cache/triton HF_HOME=/cache/hub QUIRE_DEVICE=$VARIANT
USER 10001:10001
EXPOSE 9100
HEALTHCHECK --interval=5s --timeout=4s --start-period=1800s --retries=3 \
    CMD ["python", "-m", "shared.probe", "9100", "/ready"]
ENTRYPOINT ["python", "-m", "gpu_worker"]
