"""The barrier manager: decides when an epoch begins, when it is complete, when it is visible, and what happens if not.

state.py        transition tables (no I/O)
manager.py      LocalBarrierManager: the only way from an actor to its coordinator
coordinator.py  one per lane: injects, completes in order, commits, recovers
request.py      what rides on a barrier, and what becomes of it when the barrier is lost
progress.py     progress of views and captured tables: totals that never decrease
recovery.py     root cause and back-off
"""
