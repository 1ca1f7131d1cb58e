"""Draw the rooms of jstep by their imports, for CONTRIBUTING.md: `python dev/rooms.py`.

A room is in the row below the last room that it imports. A line shows an import that no path of
other lines implies.
"""

import ast
import html
import pathlib
import re
import textwrap
from collections.abc import Mapping

ROOT = pathlib.Path(__file__).parents[1]
PICTURE = ROOT / "dev" / "rooms.svg"
WIDTH, ROW, HEIGHT, MARGIN, SHIFT = 1280, 96, 54, 16, 75


def imports_of_rooms() -> dict[str, set[str]]:
    rooms = {path.parent.name: set[str]() for path in ROOT.glob("jstep/*/__init__.py")}
    for path in ROOT.glob("jstep/*/*.py"):
        names = re.findall(
            r"^\s*(?:from|import) jstep\.(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE
        )
        rooms[path.parent.name].update(name for name in names if name != path.parent.name)
    return rooms


def row_of(room: str, rooms: Mapping[str, set[str]]) -> int:
    return max((row_of(other, rooms) + 1 for other in rooms[room]), default=0)


def reached(room: str, rooms: Mapping[str, set[str]]) -> set[str]:
    return rooms[room].union(*(reached(other, rooms) for other in rooms[room]))


def question(room: str) -> str:
    text = (
        ast.get_docstring(
            ast.parse((ROOT / "jstep" / room / "__init__.py").read_text(encoding="utf-8"))
        )
        or ""
    )
    return text[: text.index("?") + 1]


def picture() -> str:
    rooms = imports_of_rooms()
    rows: dict[int, list[str]] = {}
    for room in sorted(rooms):
        rows.setdefault(row_of(room, rooms), []).append(room)
    at: dict[str, tuple[float, float]] = {}
    shapes, lines = [], []
    for row in sorted(rows):
        # A room stands below those that it imports, so that lines cross less.
        above = {room: [at[other][0] for other in rooms[room] if other in at] for room in rows[row]}
        order = sorted(
            rows[row], key=lambda room: (sum(above[room]) / max(1, len(above[room])), room)
        )
        width = min(300.0, (WIDTH - MARGIN) / len(order) - MARGIN)
        # Rows are shifted, so that a line that passes a room is not taken for one that ends there.
        shift = (0, SHIFT, -SHIFT)[row % 3] * (len(order) < 4)
        left = (WIDTH - len(order) * (width + MARGIN) + MARGIN) / 2 + shift
        for i, room in enumerate(order):
            x, y = left + i * (width + MARGIN), MARGIN + row * ROW
            at[room] = x + width / 2, y
            words = textwrap.wrap(question(room), int(width / 6))
            texts = [
                f'<text x="{width / 2:.0f}" y="{32 + 14 * n}">{html.escape(text)}</text>'
                for n, text in enumerate(words)
            ]
            shapes.append(
                f'<g transform="translate({x:.0f} {y:.0f})"><rect width="{width:.0f}" '
                f'height="{HEIGHT}" rx="6"/>'
                f'<text x="{width / 2:.0f}" y="18" class="room">{room}</text>{"".join(texts)}</g>'
            )
    for room, others in rooms.items():
        implied = set[str]().union(*(reached(other, rooms) for other in others))
        for other in sorted(others - implied):
            (x, y), (to_x, to_y) = at[room], at[other]
            end = to_y + HEIGHT
            middle = (y + end) / 2
            curve = f"{x:.0f} {middle:.0f} {to_x:.0f} {middle:.0f} {to_x:.0f} {end:.0f}"
            lines.append(f'<path d="M{x:.0f} {y:.0f}C{curve}"/>')
    height = MARGIN + len(rows) * ROW
    style = (
        "text{font:11px "
        "sans-serif;text-anchor:middle;fill:#24292f}.room{font-weight:bold;font-size:14px}"
        "rect{fill:#f3f6fa;stroke:#8596a8}path{fill:none;stroke:#8596a8}"
    )
    body = "\n".join([*sorted(lines), *shapes])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="The rooms of jstep, each below those that it '
        f'imports">\n<style>{style}</style>\n'
        f'<rect width="{WIDTH}" height="{height}" style="fill:#fff;stroke:none"/>\n{body}\n</svg>\n'
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
