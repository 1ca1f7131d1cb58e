"""How is a result shown? As a table, or as curves, in a terminal, a notebook or a page.

- `drawing`: curves as SVG.
"""
