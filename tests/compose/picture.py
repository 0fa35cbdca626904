"""The answer of metrics.py picture (JSON on stdin) as one SVG: python tests/compose/picture.py < FILE > docs/metrics.svg."""

import json
import sys

WIDTH, HEIGHT, GAP, LEFT = 760, 90, 34, 60
SPAN_S = 420.0
INK, LINE, GRID = "#30363d", "#1f6feb", "#d0d7de"


def plot(title: str, points: list[list[float]], top: float) -> list[str]:
    highest = max((value for _, value in points), default=0.0) or 1.0
    bottom = top + HEIGHT
    out = [f'<text x="{LEFT}" y="{top - 8}" font-weight="600">{title}</text>']
    for share in (0.0, 0.5, 1.0):
        y = bottom - share * HEIGHT
        out.append(f'<line x1="{LEFT}" y1="{y}" x2="{LEFT + WIDTH}" y2="{y}" stroke="{GRID}"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{highest * share:.3g}</text>')
    path, before = "", None
    for at, value in (point for point in points if point[0] > -SPAN_S):
        if value != value:  # not a number: nothing was measured
            before = None
            continue
        command = "L" if before is not None and at - before < 20 else "M"
        path += f"{command}{LEFT + WIDTH * (1 + at / SPAN_S):.1f} {bottom - HEIGHT * value / highest:.1f}"
        before = at
    out.append(f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="1.5"/>')
    return out


def main() -> None:
    drawn = json.load(sys.stdin)
    height = len(drawn) * (HEIGHT + GAP) + GAP
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {height}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{INK}">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, (title, points) in enumerate(drawn.items()):
        out += plot(title, points, GAP + number * (HEIGHT + GAP))
    caption = "seven minutes of make test-compose: deaths and partitions under load, one CPU worker"
    out += [
        f'<text x="{LEFT + WIDTH}" y="{height - 14}" text-anchor="end">{caption}</text>',
        "</svg>",
    ]
    print("\n".join(out))


if __name__ == "__main__":
    main()
