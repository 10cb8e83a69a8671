"""The figures of the paper: one module each, with `run(out, quick)` that returns the files made."""
