"""Spark looks into every installed package `pyspark_*` for a `DefaultSource`: so `format("headwater")` needs no set-up.

The source itself is `headwater.spark.source`; `register(spark)` there serves sessions that do not look (Spark Connect
clients whose server has other packages than the client).
"""

from __future__ import annotations

from headwater.spark.source import HeadwaterSource


class DefaultSource(HeadwaterSource):
    """What Spark looks for."""


__all__ = ["DefaultSource"]
