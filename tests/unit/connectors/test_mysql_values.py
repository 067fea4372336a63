"""Values of the MySQL sink as its client library takes them."""

from __future__ import annotations

import math

import pyarrow as pa

from headwater.connectors.mysql.sink import _values


def test_a_float_that_mysql_has_not_is_a_text_that_the_server_refuses() -> None:
    found = _values(pa.array([1.5, None, math.nan, math.inf, -math.inf]))
    assert found == [1.5, None, "nan", "inf", "-inf"], "as a number it would end the whole batch in the client"
