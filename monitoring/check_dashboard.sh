#!/usr/bin/env bash
# The dashboard against Grafana's own types (npm: @grafana/schema, typescript). Exit 0: it is one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
{ echo "import type { Dashboard } from '@grafana/schema'; const made: Dashboard = "; cat grafana/quire.json; echo "; export default made;"; } > "$work/made.ts"
cd "$work"
npm install --silent --no-audit --no-fund @grafana/schema@12 typescript@5
node_modules/.bin/tsc --noEmit --strict --skipLibCheck --moduleResolution node --target es2020 made.ts
echo "the dashboard is one"
