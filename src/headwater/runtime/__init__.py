"""The running parts of an engine, each a small service; `engine.py` connects them.

registry.py    jobs by name and id                 dataflow.py     the main lane: tables, then views, per barrier
live_views.py  the views' half of that lane        tables.py       the state of both between two barriers
writes.py      INSERT, UPDATE, DELETE              queries.py      SELECT at one epoch
commands.py    statements → actions                catalogue.py    hw_catalog
maintenance.py compaction, garbage collection      capture.py      sources, splits and hand-over
creating.py    views that are being created        view_creator.py the actor in the lane of one
delivery.py    sinks
"""
