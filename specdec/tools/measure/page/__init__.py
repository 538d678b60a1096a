"""The page of a measurement: one HTML file with charts, tables and definitions that opens offline."""
