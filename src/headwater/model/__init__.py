"""The words of the system: epoch, barrier, change, offset, key, schema, vnode. No I/O, no Spark."""
