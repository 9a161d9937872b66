"""The hash by which Kafka's Java client chooses a key's partition.

Source: org.apache.kafka.common.utils.Utils#murmur2 and BuiltInPartitioner.
"""

import struct
from functools import lru_cache
from typing import Final

_SEED: Final = 0x9747B28C
_M: Final = 0x5BD1E995
_MASK: Final = 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """MurmurHash2 of `data`, unsigned 32 bits, with the Java client's seed."""
    length = len(data)
    words = length // 4
    h = _SEED ^ length
    for word in struct.unpack_from(f"<{words}I", data):
        k = word * _M & _MASK
        k = (k ^ k >> 24) * _M & _MASK
        h = h * _M & _MASK ^ k
    tail = data[words * 4 :]
    if tail:
        h = (h ^ int.from_bytes(tail, "little")) * _M & _MASK
    h = (h ^ h >> 13) * _M & _MASK
    return h ^ h >> 15


@lru_cache(maxsize=65_536)  # keys come again and again, and hashing one costs more than encoding a record
def positive_hash(key: bytes) -> int:
    """The hash as the Java client makes it positive: without the sign bit."""
    return murmur2(key) & 0x7FFFFFFF


def partition_of(key: bytes, partition_count: int) -> int:
    """The partition of a key among `partition_count`, as the Java client's default partitioner says."""
    return positive_hash(key) % partition_count
