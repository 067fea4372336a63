"""What the analysis knows of functions: which aggregate, which generate rows, which may not be in a view at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sqlglot import exp

# Spark aggregates that sqlglot reads as functions it does not know.
AGGREGATE_NAMES: Final = frozenset(
    [
        "any",
        "approx_percentile",
        "bit_and",
        "bit_or",
        "bit_xor",
        "bitmap_and_agg",
        "bitmap_construct_agg",
        "bitmap_or_agg",
        "bool_and",
        "bool_or",
        "collect_list",
        "collect_set",
        "array_agg",
        "corr",
        "count_if",
        "count_min_sketch",
        "covar_pop",
        "covar_samp",
        "every",
        "first",
        "first_value",
        "grouping",
        "grouping_id",
        "histogram_numeric",
        "kll_merge_agg_bigint",
        "kll_merge_agg_double",
        "kll_merge_agg_float",
        "kll_sketch_agg_bigint",
        "kll_sketch_agg_double",
        "kll_sketch_agg_float",
        "kurtosis",
        "last",
        "last_value",
        "listagg",
        "max_by",
        "mean",
        "median",
        "min_by",
        "mode",
        "percentile",
        "percentile_approx",
        "percentile_cont",
        "percentile_disc",
        "regr_avgx",
        "regr_avgy",
        "regr_count",
        "regr_intercept",
        "regr_r2",
        "regr_slope",
        "regr_sxx",
        "regr_sxy",
        "regr_syy",
        "skewness",
        "some",
        "std",
        "stddev",
        "stddev_pop",
        "stddev_samp",
        "string_agg",
        "theta_intersection_agg",
        "theta_sketch_agg",
        "theta_union_agg",
        "try_avg",
        "try_sum",
        "var_pop",
        "var_samp",
        "variance",
        "any_value",
        "hll_sketch_agg",
        "hll_union_agg",
        "approx_count_distinct",
    ]
)
GENERATOR_NAMES: Final = frozenset(
    [
        "explode",
        "explode_outer",
        "posexplode",
        "posexplode_outer",
        "inline",
        "inline_outer",
        "stack",
        "json_tuple",
        "window",
    ]
)
# name -> why the result of a view with it would not be the query's
NON_DETERMINISTIC: Final[dict[str, str]] = {
    **dict.fromkeys(
        [
            "now",
            "current_timestamp",
            "current_date",
            "curdate",
            "current_time",
            "localtimestamp",
            "unix_timestamp_now",
            "getdate",
        ],
        "its value depends on when the query runs",
    ),
    **dict.fromkeys(
        [
            "rand",
            "random",
            "randn",
            "uuid",
            "shuffle",
            "randstr",
            "uniform",
            "monotonically_increasing_id",
            "spark_partition_id",
            "input_file_name",
            "input_file_block_start",
            "input_file_block_length",
        ],
        "its value differs from run to run",
    ),
    **dict.fromkeys(
        [
            "current_user",
            "user",
            "session_user",
            "current_catalog",
            "current_database",
            "current_schema",
            "version",
            "current_timezone",
        ],
        "its value depends on the session",
    ),
    **dict.fromkeys(
        ["first", "first_value", "last", "last_value", "any_value"],
        "as an aggregate its value depends on the order of the rows",
    ),
    **dict.fromkeys(
        ["collect_list", "array_agg", "collect_set", "listagg", "string_agg"],
        "the order of its elements depends on the order of the rows",
    ),
    "mode": "of several values that are equally frequent it takes any",
    **dict.fromkeys(["java_method", "reflect", "try_reflect"], "it may call anything"),
}
# Texts that mean a moment when Spark casts them to a date or timestamp ("epoch" is one too, and always the same).
MOMENTS: Final = frozenset({"now", "today", "tomorrow", "yesterday"})
MOMENT_FUNCTIONS: Final = frozenset(
    {"date", "to_date", "try_to_date", "timestamp", "to_timestamp", "try_to_timestamp"}
    | {"to_timestamp_ltz", "to_timestamp_ntz"}
    # These take a date or a timestamp, so that Spark casts a text that they are given.
    | {"add_months", "convert_timezone", "date_add", "date_diff", "date_format", "date_part", "date_sub", "date_trunc"}
    | {"dateadd", "datediff", "datepart", "day", "dayofmonth", "dayofweek", "dayofyear", "extract", "hour", "last_day"}
    | {"minute", "month", "months_between", "next_day", "quarter", "second", "timestampadd", "timestampdiff", "trunc"}
    | {"from_utc_timestamp", "to_utc_timestamp", "unix_date", "unix_micros", "unix_millis", "unix_seconds"}
    | {"weekday", "weekofyear", "year"}
)
WINDOW_ORDERED: Final = frozenset({"first", "first_value", "last", "last_value", "any_value"})
# Functions of an array whose result does not depend on the order of its elements.
SORTING: Final = frozenset(
    {"sort_array", "array_sort", "size", "cardinality", "array_size", "array_contains", "array_max", "array_min"}
)
WRAPPERS = (exp.Filter, exp.WithinGroup, exp.IgnoreNulls, exp.RespectNulls)


def function_name(node: exp.Expr) -> str | None:
    """The Spark name of a function call in lower case, None for other nodes."""
    if isinstance(node, exp.Anonymous):
        return str(node.name).lower()
    if isinstance(node, exp.Func) and not isinstance(node, (exp.And, exp.Or, exp.Cast, exp.Case, exp.Connector)):
        text = node.sql("spark")
        return text.split("(", 1)[0].strip().lower()
    return None


def is_aggregate(node: exp.Expr) -> bool:
    if isinstance(node, exp.Anonymous):
        return node.name.lower() in AGGREGATE_NAMES
    return isinstance(node, exp.AggFunc)


def is_generator(expr: exp.Expr) -> bool:
    """Whether an expression gives several rows (or, `window`, none) for one."""
    return any(function_name(node) in GENERATOR_NAMES for node in expr.walk() if isinstance(node, exp.Func))


def only_whole(query: exp.Expr) -> str | None:
    """Why a query has to be recomputed as it was written, whatever its operators; None for most."""
    if query.find(exp.Collate) is not None:
        return "of texts that a collation takes for equal, any may stand for the others"
    if any(not isinstance(star.parent, (exp.Count, exp.Select)) for star in query.find_all(exp.Star)):
        return "the star in a function stands for the columns of the query"
    if query.find(exp.ArraysZip) is not None:
        return "arrays_zip names the fields of its result after the columns of the query"
    if any(function_name(node) == "session_window" for node in query.find_all(exp.Anonymous)):
        return "where a session ends depends on the rows that follow"
    return None


def _walk(expr: exp.Expr) -> Iterator[exp.Expr]:
    """The nodes of an expression without what is inside subqueries."""
    yield expr
    if isinstance(expr, exp.Query):
        return
    for child in expr.iter_expressions():
        yield from _walk(child)


def aggregate_units(expr: exp.Expr) -> list[exp.Expr]:
    """The outermost aggregate calls (with their FILTER) of an expression; those of windows are not among them."""
    if isinstance(expr, exp.Query):
        return []
    if isinstance(expr, exp.Window):
        inner = expr.this
        while isinstance(inner, WRAPPERS):
            inner = inner.this
        children = [*inner.iter_expressions(), *(c for c in expr.iter_expressions() if c is not expr.this)]
        return [unit for child in children for unit in aggregate_units(child)]
    if is_aggregate(expr) or (isinstance(expr, WRAPPERS) and is_aggregate(expr.this)):
        return [expr]
    return [unit for child in expr.iter_expressions() for unit in aggregate_units(child)]


def window_units(expr: exp.Expr) -> list[tuple[str, exp.Expr]]:
    """The window calls of an expression with their text (the text identifies equal ones)."""
    return [(node.sql("spark"), node) for node in _walk(expr) if isinstance(node, exp.Window)]
