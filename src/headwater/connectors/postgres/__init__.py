"""The Postgres connector: `types` and `columns` decode values, `copytext` and `wirerows` the snapshot, `pgoutput` the
change stream.

Those modules are pure (no server, no Spark). The catalogue, the slot's reader and the split reads build on them.
"""
