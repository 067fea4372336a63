"""Files as a sink: Parquet or JSON lines with a committed manifest."""
