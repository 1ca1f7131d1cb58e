"""How is a result shown? As a table, or as curves, in a terminal, a notebook or a page.

- `tables`: tables as text and as HTML.
- `drawing`: curves as SVG.
"""
