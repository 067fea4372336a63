"""The log between a job and its sink: references to change-log segments, read in whole epochs, truncated when
delivered.

`writer.py` appends, `buffer.py` holds the live part, `reader.py` gives batches, `state.py` is what a checkpoint
stores, `backoff.py` the waiting after failures. No I/O and no Spark: the engine brings the history
(`reader.History`) and the rows, and stores the state; `sink/delivery.py` delivers. An entry of the log is a row of a
change-log segment; `storage/segments.py` has its formats v2 and v1.
"""

from headwater.logstore.backoff import Backoff
from headwater.logstore.buffer import LogBuffer
from headwater.logstore.chunk import Backlog, ChunkRef, LogBatch, LogEpoch
from headwater.logstore.offset import TruncateOffset
from headwater.logstore.reader import History, LogStoreReader
from headwater.logstore.state import LogStoreState
from headwater.logstore.writer import LogStoreWriter

__all__ = [
    "Backlog",
    "Backoff",
    "ChunkRef",
    "History",
    "LogBatch",
    "LogBuffer",
    "LogEpoch",
    "LogStoreReader",
    "LogStoreState",
    "LogStoreWriter",
    "TruncateOffset",
]
