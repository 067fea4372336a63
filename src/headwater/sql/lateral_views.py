"""`FROM t LATERAL VIEW explode(a) x AS y JOIN u ON u.id = y`, as Hive has it.

Spark has LATERAL VIEW after all joins only, and sqlglot writes it there: ON would not know `y`, and an outer join would
keep other rows. A view before a join becomes a join itself, `JOIN LATERAL explode(a) AS x(y)`, in its place.
"""

from __future__ import annotations

from sqlglot import exp


def in_place(tree: exp.Expression) -> exp.Expression:
    """Changes the tree; positions are those of the text that it was read from."""
    for select in tree.find_all(exp.Select):
        joins, views = select.args.get("joins"), select.args.get("laterals")
        if joins and views:
            _move(select, joins, views)
    return tree


def _move(select: exp.Select, joins: list[exp.Join], views: list[exp.Lateral]) -> None:
    last = max(map(_position, joins))
    early = [view for view in views if 0 <= _position(view) < last]
    if early:
        ordered = sorted([*joins, *early], key=_position)
        select.set("laterals", [view for view in views if not 0 <= _position(view) < last])
        select.set("joins", [_join(x) if isinstance(x, exp.Lateral) else x for x in ordered])


def _join(view: exp.Lateral) -> exp.Join:
    call = exp.Lateral(this=view.this, alias=view.args.get("alias"))
    side = "LEFT" if view.args.get("outer") else None
    return exp.Join(this=call, side=side, on=exp.true())


def _position(node: exp.Expr) -> int:
    """Where its first name stands; -1 if it has none."""
    return min((int(name.meta["start"]) for name in node.find_all(exp.Identifier) if "start" in name.meta), default=-1)
