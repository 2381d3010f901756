"""The weight store: checkpoint index, layout and disk reader."""
