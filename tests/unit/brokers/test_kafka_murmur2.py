"""Partitions are chosen as the Java client chooses them."""

import pytest
from aiokafka.partitioner import murmur2 as murmur2_of_the_client
from hypothesis import given
from hypothesis import strategies as st

from towpath.brokers.kafka.murmur2 import murmur2, partition_of

JAVA_VECTORS = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize("key", JAVA_VECTORS)
def test_hashes_are_those_of_the_java_client(key: bytes) -> None:
    """Source: org.apache.kafka.common.utils.UtilsTest#testMurmur2."""
    assert murmur2(key) == JAVA_VECTORS[key] & 0xFFFFFFFF


@given(st.binary(max_size=200))
def test_hashes_agree_with_the_client_library(key: bytes) -> None:
    """An independent port of the same function."""
    assert murmur2(key) == murmur2_of_the_client(key)


@given(st.binary(), st.integers(1, 1000))
def test_partitions_are_within_range_and_stable(key: bytes, count: int) -> None:
    """Also for hashes that are negative in Java."""
    assert 0 <= partition_of(key, count) < count
    assert partition_of(key, count) == (murmur2(key) & 0x7FFFFFFF) % count
