"""Draws the first table of RESULTS.md, ours over vLLM by workload, as docs/serving.svg.

usage: python -m benchmarks.plot
"""

import re
from pathlib import Path

RESULTS = Path(__file__).with_name("RESULTS.md")
PICTURE = RESULTS.parent.parent / "docs" / "serving.svg"
WIDTH, LEFT, BAR, GAP, SCALE = 1040, 190, 20, 14, 220  # pixels; SCALE: of a ratio of 1


def rows(text: str) -> list[tuple[str, float, float]]:
    """(workload, ours / vLLM, target) of each line that has a ratio and a target."""
    found = []
    for line in text.split("## ")[1].splitlines():
        cells = [cell.strip(" *") for cell in line.split("|")]
        if len(cells) == 8 and re.fullmatch(r"\d\.\d+", cells[5]) and re.fullmatch(r"\d\.\d+", cells[6]):
            found.append((re.sub(r"`| \(.*", "", cells[1]), float(cells[5]), float(cells[6])))
    return found


def picture(table: list[tuple[str, float, float]]) -> str:
    height = (BAR + GAP) * len(table) + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        '<text x="10" y="20">output tokens/s, ours / vLLM, one H200, 8B; the mark is the target</text>',
    ]
    for number, (name, ratio, target) in enumerate(table):
        y = 36 + number * (BAR + GAP)
        colour = "#2a7f62" if ratio >= target else "#c0803a"
        mark = LEFT + target * SCALE
        parts += [
            f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{name}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{ratio * SCALE:.0f}" height="{BAR}" fill="{colour}"/>',
            f'<line x1="{mark:.0f}" y1="{y - 4}" x2="{mark:.0f}" y2="{y + BAR + 4}" stroke="black" stroke-width="2"/>',
            f'<text x="{LEFT + max(ratio, target) * SCALE + 8:.0f}" y="{y + 15}">{ratio:.2f}</text>',
        ]
    one = LEFT + SCALE
    parts.append(f'<line x1="{one}" y1="30" x2="{one}" y2="{height - 10}" stroke="#888" stroke-dasharray="4 4"/>')
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    PICTURE.write_text(picture(rows(RESULTS.read_text())))
    print(PICTURE)
