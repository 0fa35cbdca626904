#!/usr/bin/env bash
# The compose stack for real, on the CPU: up, Paris, three gateways, deaths and a partition under load, metrics, down.
# Needs a running docker with compose, and the virtual environment (openai). BUILD=0 takes the images that are there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export COMPOSE_PROJECT_NAME=quire-test QUIRE_PORTS=${QUIRE_PORTS:-18000-18002}
WORK=$(mktemp -d)
export QUIRE_ENV_FILE=$WORK/quire.env
echo QUIRE_DTYPE=float32 > "$QUIRE_ENV_FILE"  # in bfloat16 a near tie may fall either way when the rows of a step are others
FIRST_PORT=${QUIRE_PORTS%-*}
PYTHON=${PYTHON:-.venv/bin/python}
BUILD=${BUILD:-1}
LOAD_S=${LOAD_S:-20}
ROLES="scheduler worker gateway"
IMAGE=$(sed -n 's/^ *image: \(prom.*\)/\1/p' compose.yaml)
MONITORED=
if docker image inspect "$IMAGE" > /dev/null 2>&1 || docker pull -q "$IMAGE" > /dev/null 2>&1; then MONITORED=prometheus; fi
PASSED=0 FAILED=0

compose() { docker compose --progress quiet -f compose.yaml -f compose.cpu.yaml "$@"; }
container() { docker ps -q --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME" \
    --filter "label=com.docker.compose.service=$1" | head -1; }
first_port() { docker port "$(container gateway)" 8000/tcp | head -1 | sed 's/.*://'; }
urls() { for number in 0 1 2; do echo "http://127.0.0.1:$((FIRST_PORT + number))/v1"; done; }

check() {  # NAME COMMAND...: one line of the result
    local name=$1 started=$SECONDS
    shift
    if "$@"; then PASSED=$((PASSED + 1)); echo "ok      $name ($((SECONDS - started)) s)"
    else FAILED=$((FAILED + 1)); echo "FAILED  $name"; fi
}

paris() {
    "$PYTHON" - "http://127.0.0.1:$1/v1" <<'PY'
import sys
from openai import OpenAI
client = OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
answer = client.chat.completions.create(model=client.models.list().data[0].id, temperature=0, max_tokens=30,
    messages=[{"role": "user", "content": "Tell me the capital of France in one sentence."}]).choices[0].message.content
print(f"        {answer}")
sys.exit("Paris" not in (answer or ""))
PY
}

while_loaded() {  # COMMAND...: streams run, the command happens to the stack, the streams go on
    local output status=0
    output=$(mktemp)
    # shellcheck disable=SC2046
    "$PYTHON" tests/compose/load.py "$LOAD_S" $(urls) > "$output" 2>&1 &
    local load=$!
    until grep -q loaded "$output"; do
        if ! kill -0 "$load" 2> /dev/null; then break; fi
        sleep 0.2
    done
    sleep 2
    "$@" > /dev/null || status=1
    wait "$load" || status=$?
    sed 's/^/        /' "$output" | grep -v loaded
    rm -f "$output"
    return "$status"
}

kill_and_start() { docker kill "$(container "$1")"; sleep 1; compose start "$1" 2>&1; }
crash() {  # the process dies by itself, and the restart policy brings it back
    compose exec -T "$1" python -c "import os; [os.kill(int(p), 9) for p in os.listdir('/proc')
        if p.isdigit() and 1 < int(p) < os.getpid() and b'-m' in open(f'/proc/{p}/cmdline', 'rb').read()]" || true
}
ask() { "$PYTHON" tests/compose/metrics.py "http://$(address "$(container prometheus)"):9090" "$@"; }
freeze() { docker pause "$(container "$1")"; local status=0; ask firing QuireNoProgress 150 || status=1
    docker unpause "$(container "$1")"; return "$status"; }
partition() { local who; who=$(container "$1"); docker network disconnect "${COMPOSE_PROJECT_NAME}_inner" "$who"; sleep 8
    docker network connect --alias "$1" "${COMPOSE_PROJECT_NAME}_inner" "$who"; }

move_scheduler() {  # it comes back under another address: a rolling update, seen from its peers
    local who network before
    who=$(container scheduler) network="${COMPOSE_PROJECT_NAME}_inner"
    before=$(address "$who")
    docker network disconnect "$network" "$who"
    docker run -d --rm --name "$COMPOSE_PROJECT_NAME-squatter" --network "$network" --entrypoint sleep quire-scheduler:0.1.0 120
    docker network connect --alias scheduler "$network" "$who"
    docker kill "$COMPOSE_PROJECT_NAME-squatter"
    test "$(address "$who")" != "$before"
}
two_workers() {
    # shellcheck disable=SC2086
    compose up -d --wait --no-build --scale worker=2 --scale gateway=3 $ROLES $MONITORED
}
one_worker() { compose up -d --no-build --no-deps --scale worker=1 worker; }

over_tls() {  # clients need a certificate and a key, probes and Prometheus neither
    local key url get=(curl --silent --max-time 60 --cacert "$WORK/tls/tls.crt")
    mkdir "$WORK/tls"
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=localhost \
        -addext subjectAltName=DNS:localhost -keyout "$WORK/tls/tls.key" -out "$WORK/tls/tls.crt" 2> /dev/null
    docker run --rm --entrypoint python quire-gateway:0.1.0 -m gateway.api_keys > "$WORK/made"
    key=$(sed -n 's/^key: *//p' "$WORK/made")
    { echo "[tenants.one]"; sed -n 's/^file: *//p' "$WORK/made"; } > "$WORK/tenants.toml"
    chmod -R a+rX "$WORK"
    # shellcheck disable=SC2086
    QUIRE_TLS=$WORK/tls QUIRE_TENANTS=$WORK/tenants.toml compose -f compose.tls.yaml -f compose.tenants.yaml \
        up -d --wait --no-build $ROLES $MONITORED || return 1
    url=https://localhost:$(first_port)/v1/models
    test "$("${get[@]}" -o /dev/null -w '%{http_code}' "$url")" = 401 || return 1
    "${get[@]}" -H "Authorization: Bearer $key" "$url" | grep -o '"id": *"[^"]*"' || return 1
    test -n "$MONITORED" || return 0
    for _ in {1..24}; do if ask targets 3; then return 0; else sleep 5; fi; done
    return 1
}

followed() {  # one request that Prometheus names is in the logs of all roles
    local id role
    id=$(ask exemplars) || return 1
    echo "        $id"
    for role in $ROLES; do compose logs --no-log-prefix "$role" 2>&1 | grep "\"$id\"" > /dev/null || { echo "        not in the log of $role"; return 1; }; done
}

not_root() { test "$(compose exec -T "$1" python -c 'import os; print(os.getuid())')" = 10001; }
read_only() { ! compose exec -T "$1" python -c 'open("/app/x", "w")' 2> /dev/null; }
writes() { compose exec -T "$1" python -c 'import os; open("/cache/x", "w"); os.remove("/cache/x"); open("/tmp/x", "w")'; }
keys_apart() {  # each role has its own secret and no other's
    test "$(compose exec -T "$1" python -c 'import os; print([f for f in os.listdir("/keys") if f.endswith(".secret")])')" = "['$1.secret']"; }
address() { docker inspect -f "{{(index .NetworkSettings.Networks \"${COMPOSE_PROJECT_NAME}_inner\").IPAddress}}" "$1"; }
published() { test "$(docker ps --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME" --format '{{.Names}} {{.Ports}}' \
    | grep -- '->' | grep -vc gateway)" = 0; }

clean() { compose down --volumes --remove-orphans --timeout 20 > /dev/null 2>&1; }
nothing_left() {
    local left
    left=$(for kind in "container ls -a" "volume ls" "network ls"; do
        # shellcheck disable=SC2086
        docker $kind -q --filter "label=com.docker.compose.project=$COMPOSE_PROJECT_NAME"; done)
    test -z "$left"
}

trap 'clean; rm -rf "$WORK"' EXIT
clean || true
if [ "$BUILD" = 1 ]; then compose build --quiet keys model gateway; fi
# shellcheck disable=SC2086
check "up --wait" compose up -d --wait --no-build --quiet-pull $ROLES $MONITORED
check "the OpenAI SDK gets Paris" paris "$(first_port)"
for role in $ROLES; do
    check "$role: not root" not_root "$role"
    check "$role: read-only root" read_only "$role"
    check "$role: writes to its cache" writes "$role"
    check "$role: only its own secret" keys_apart "$role"
done
check "only the gateway's port is published" published
# shellcheck disable=SC2086
check "--scale gateway=3" compose up -d --wait --no-build --scale gateway=3 $ROLES $MONITORED
for number in 0 1 2; do check "gateway $number answers" paris $((FIRST_PORT + number)); done
check "streams survive docker kill of the worker" while_loaded kill_and_start worker
check "streams survive a crash of the scheduler" while_loaded crash scheduler
check "streams survive docker kill of the scheduler" while_loaded kill_and_start scheduler
check "streams survive a gateway cut off from the network for 8 s" while_loaded partition gateway
check "streams survive the worker cut off from the network for 8 s" while_loaded partition worker
check "streams survive a scheduler that comes back under another address" while_loaded move_scheduler
check "--scale worker=2" two_workers
check "streams survive --scale worker=1" while_loaded one_worker
if [ -n "$MONITORED" ]; then
    check "Prometheus scrapes every role" ask targets 5
    check "every expression of the dashboard returns data" ask dashboard monitoring/grafana/quire.json
    check "an exemplar leads to the request in the logs of all roles" followed
    check "a frozen worker raises an alert, and its streams survive" while_loaded freeze worker
    check "the alert ends" ask quiet QuireNoProgress 150
    ask picture > "${PICTURE:-/dev/null}"
else
    echo "        Prometheus' image is not to be had: its checks are left out"
fi
check "Paris after all that" paris "$FIRST_PORT"
check "HTTPS and API keys: the stack is healthy and scraped" over_tls
compose logs --no-log-prefix scheduler 2>&1 | grep -E '"level": "(error|critical)"' | head -5 || true
docker image ls --format '        {{.Repository}}:{{.Tag}}  {{.Size}}' | grep -E 'quire-|python:3.11-slim' || true
clean
check "down leaves nothing" nothing_left
echo "$PASSED passed, $FAILED failed"
test "$FAILED" = 0
