"""CDC backfill with exact hand-over: `mark.py` is the rule, `state.py` the life of a split."""
