"""Tables and curves as HTML and SVG, for pages and notebooks."""
