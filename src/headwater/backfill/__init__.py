"""Backfill: `cdc/` copies a table of an external database, `snapshot/` a table of ours into a new view."""
