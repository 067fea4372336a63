"""The data plane: Spark alone touches rows. The only room, with the connectors' Spark parts, that imports pyspark.

session.py   the session and its settings        jobs.py     running and counting jobs, pools
tasks.py     many small pieces of work, one job  segment.py  bulk writing of segments by Spark's own writer
table.py     reading tables and change logs      query.py    user queries
"""
