"""Where prompts come from: the order of records, loaders and their state, files."""

from __future__ import annotations

import json
import logging
import random
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay import RolloutState
from forebay.codec.frame import encode_group
from forebay.errors import DamagedData, InvalidDataset, InvalidInput, InvalidRecord, UnreadableData
from forebay.prompts import jsonl
from forebay.prompts.jsonl import JSONLDataset
from forebay.prompts.loader import LoaderSource, pack_loader_state, unpack_loader_state
from forebay.prompts.sources import MapSource, Source, open_source, shuffled_index


def order(seed: int, epoch: int, size: int) -> list[int]:
    return [shuffled_index(seed, epoch, index, size) for index in range(size)]


def opened(dataset: Any) -> Source:
    return open_source(dataset, seed=0, shuffle=False)


def read(source: Source, n: int, start: int = 0) -> list[Any]:
    found = [source.read(cursor) for cursor in range(start, start + n)]
    return [each[1] for each in found if each is not None]


# --- order --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [*range(1, 201), 255, 256, 257, 1023, 1024, 1025, 4096, 5000])
def test_the_order_of_an_epoch_is_a_permutation(size: int) -> None:
    for seed, epoch in ((0, 0), (7, 3)):
        assert sorted(order(seed, epoch, size)) == list(range(size))


@given(seed=st.integers(), epoch=st.integers(0, 10**9), size=st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_the_order_is_a_permutation_for_any_seed_and_epoch(seed: int, epoch: int, size: int) -> None:
    assert sorted(order(seed, epoch, size)) == list(range(size))


@given(size=st.integers(2**32, 2**63), data=st.data())
@settings(max_examples=50, deadline=None)
def test_huge_data_sets_are_within_range_and_distinct(size: int, data: st.DataObject) -> None:
    indexes = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=5, unique=True))
    shuffled = [shuffled_index(1, 0, index, size) for index in indexes]
    assert all(0 <= index < size for index in shuffled)
    assert len(set(shuffled)) == len(indexes)


def test_every_epoch_and_every_seed_has_its_own_order() -> None:
    orders = [tuple(order(seed, epoch, 50)) for seed in range(10) for epoch in range(10)]
    assert len(set(orders)) == 100
    assert tuple(range(50)) not in orders


@pytest.mark.parametrize(
    ("seed", "epoch", "size", "expected"),
    [
        (0, 0, 1, [0]),
        (0, 0, 2, [0, 1]),
        (0, 1, 2, [1, 0]),
        (1, 0, 5, [2, 3, 4, 1, 0]),
        (7, 0, 10, [7, 1, 9, 0, 4, 5, 6, 3, 2, 8]),
        (7, 1, 10, [9, 2, 4, 8, 1, 6, 0, 3, 5, 7]),
        (-3, 2, 17, [11, 15, 8, 3, 6, 16, 4, 5, 14, 2, 10, 1, 12, 13, 7, 9, 0]),
        (0, 0, 1000, [900, 723, 13, 468, 338, 976]),
        (123456789, 41, 1_000_003, [67012, 870526, 424857, 7846, 717430, 270228]),
        (2**70, 0, 2**40, [638788704964, 754808279250, 227208999552, 115259740937, 616059010800, 758331475734]),
    ],
)
def test_the_order_never_changes_because_resuming_depends_on_it(
    seed: int, epoch: int, size: int, expected: list[int]
) -> None:
    assert [shuffled_index(seed, epoch, index, size) for index in range(len(expected))] == expected


@pytest.mark.parametrize(("size", "bound"), [(2, 15.1), (5, 23.5), (100, 161.3)])  # p = 0.0001
def test_a_record_comes_at_any_position_equally_often(size: int, bound: float) -> None:
    draws = 4_000 if size < 100 else 10_000
    for index in (0, size - 1):
        for by in ("seed", "epoch"):
            counts = [0] * size
            for number in range(draws):
                seed, epoch = (number, 0) if by == "seed" else (11, number)
                counts[shuffled_index(seed, epoch, index, size)] += 1
            expected = draws / size
            assert sum((count - expected) ** 2 / expected for count in counts) < bound, (index, by)


# --- what a user calls a data set ---------------------------------------------------------------------


class Untouchable:
    """Fails if it is looked into."""

    def __len__(self) -> int:
        raise AssertionError("its length was asked for")

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("it was iterated")

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("its state was asked for")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("its state was set")


class UntouchableMap(Untouchable):
    def __getitem__(self, index: int) -> Any:
        raise AssertionError("it was indexed")


def test_opening_touches_nothing() -> None:
    assert isinstance(opened(Untouchable()), LoaderSource)
    assert isinstance(opened(UntouchableMap()), MapSource)
    assert isinstance(opened("/nowhere/at/all.jsonl"), MapSource)
    assert isinstance(opened(Path("/nowhere/at/all.jsonl")), MapSource)


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ({"train": [1]}, "is a mapping"),
        ((number for number in range(3)), "is an iterator"),
        (iter([1]), "is an iterator"),
        (7, "is not a data set"),
        (None, "is not a data set"),
    ],
)
def test_a_value_that_is_not_a_data_set_is_refused_with_the_supported_types(dataset: Any, said: str) -> None:
    with pytest.raises(InvalidDataset, match=said) as refused:
        opened(dataset)
    assert "expected" in str(refused.value)


@pytest.mark.parametrize("seed", [1.5, "1", None, True])
def test_a_seed_is_an_integer(seed: Any) -> None:
    with pytest.raises(InvalidInput, match="seed"):
        open_source([1], seed=seed, shuffle=True)


def test_an_iterable_data_set_of_torch_is_iterated_though_it_has_a_length() -> None:
    class Dataset:
        def __getitem__(self, index: int) -> Any:
            raise NotImplementedError

    class IterableDataset(Dataset):
        def __iter__(self) -> Iterator[int]:
            return iter([5, 6])

        def __len__(self) -> int:
            return 2

    assert read(opened(IterableDataset()), 3) == [5, 6, 5]


# --- map-style ----------------------------------------------------------------------------------------


@given(size=st.integers(1, 30), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_every_epoch_has_every_record_once_in_its_own_order(size: int, seed: int) -> None:
    source = open_source(list(range(size)), seed=seed, shuffle=True)
    epochs = [read(source, size, size * epoch) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    assert epochs == [order(seed, epoch, size) for epoch in range(3)]


def test_without_shuffling_the_order_is_the_data_sets_own() -> None:
    assert read(opened([10, 20, 30]), 7) == [10, 20, 30, 10, 20, 30, 10]


def test_an_empty_data_set_says_so_when_it_is_drawn_from() -> None:
    source = opened([])
    with pytest.raises(InvalidDataset, match="list is empty"):
        source.read(0)


def test_a_record_that_cannot_be_read_is_named_by_its_index() -> None:
    class Torn:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            raise OSError("disk on fire")

    with pytest.raises(InvalidRecord, match=r"record 1 .*OSError: disk on fire") as refused:
        opened(Torn()).read(4)
    assert refused.value.index == 1


def test_a_data_set_that_grows_while_it_is_drawn_from_is_refused() -> None:
    records = [1, 2, 3]
    source = opened(records)
    source.read(0)
    records.append(4)
    with pytest.raises(InvalidDataset, match="has 4 records, but had 3"):
        source.read(1)


# --- loaders ------------------------------------------------------------------------------------------


class Counted:
    """A re-iterable without state."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self.begun = 0

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        return iter(range(self.size))


class Stateful:
    """Keeps its own place, as torchdata does: after the state of an epoch's end, an empty epoch comes first."""

    def __init__(self, size: int = 4, extra: Any = None) -> None:
        self.size, self.extra = size, extra
        self.position, self.resumed = 0, False

    def __iter__(self) -> Iterator[int]:
        if not self.resumed:
            self.position = 0
        self.resumed = False
        while self.position < self.size:
            self.position += 1
            yield self.position - 1

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "extra": self.extra}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.extra, self.resumed = state["position"], state["extra"], True


def test_a_loader_is_read_epoch_after_epoch() -> None:
    assert read(opened(Counted(3)), 8) == [0, 1, 2, 0, 1, 2, 0, 1]


def test_only_the_last_record_of_a_loader_can_be_read_again() -> None:
    source = opened(Counted(3))
    assert read(source, 2) == [0, 1]
    assert source.read(1) == (1, 1)
    for cursor in (0, 3):
        with pytest.raises(InvalidDataset, match=f"is at record 2, but record {cursor} was asked for"):
            source.read(cursor)
    assert source.read(2) == (2, 2)


def test_a_loader_that_is_already_at_the_cursor_is_not_moved() -> None:
    loader = Counted(3)
    source = opened(loader)
    before = source.state()
    read(source, 1)
    after = source.state()
    source.restore(1, after)
    source.restore(0, before)  # the record before the cursor
    assert source.read(0) == (0, 0)
    assert source.read(1) == (1, 1)
    assert loader.begun == 1


def test_an_empty_loader_is_refused_instead_of_iterated_forever() -> None:
    source = opened(Counted(0))
    with pytest.raises(InvalidDataset, match="gave no record in a whole epoch"):
        source.read(0)


@pytest.mark.parametrize("kind", [Counted, Stateful])
@pytest.mark.parametrize("cut", range(13))
def test_a_loader_continues_from_any_position(kind: type[Counted] | type[Stateful], cut: int) -> None:
    source = opened(kind())
    expected = read(source, 20)
    source = opened(kind())
    read(source, cut)
    again = opened(kind())
    again.restore(cut, source.state())
    assert read(again, 20 - cut, cut) == expected[cut:]


def test_skipping_ahead_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    source = opened(Counted(4))
    read(source, 6)
    with caplog.at_level(logging.WARNING):
        opened(Counted(4)).restore(6, source.state())
    assert "loader_skips_ahead records=2 epoch=1" in caplog.text


def test_a_loader_that_is_shorter_than_before_is_refused() -> None:
    source = opened(Counted(4))
    read(source, 3)
    with pytest.raises(InvalidDataset, match="ended after 2 records of epoch 0, but 3 were drawn before"):
        opened(Counted(2)).restore(3, source.state())


def test_a_loader_cannot_continue_from_the_position_of_a_map_style_data_set() -> None:
    with pytest.raises(InvalidDataset, match="5 groups were drawn, but there is no loader state"):
        opened(Counted()).restore(5, None)
    source = opened(Counted())
    read(source, 2)
    with pytest.raises(InvalidDataset, match="9 groups were drawn, but the loader state is that of record 2"):
        opened(Counted()).restore(9, source.state())


def test_a_loader_with_a_state_does_not_start_again_for_another_task() -> None:
    source = opened(Stateful())
    read(source, 2)
    with pytest.raises(InvalidDataset, match="is at record 2, and cannot return to its start"):
        source.restore(0, None)
    assert source.read(2) == (2, 2)
    plain = opened(Counted())
    read(plain, 2)
    plain.restore(0, None)
    assert plain.read(0) == (0, 0)


@pytest.mark.parametrize("state", [b"", b"nothing of ours", b"FBG1" + bytes(40)])
def test_bytes_that_are_not_a_state_are_refused_and_the_position_is_kept(state: bytes) -> None:
    source = opened(Counted())
    read(source, 2)
    with pytest.raises(DamagedData):
        source.restore(5, state)
    assert source.read(2) == (2, 2)


def test_a_state_of_an_earlier_version_is_refused_by_name() -> None:
    """Forebay 0.1 stored a loader's state as a group."""
    with pytest.raises(UnreadableData, match=r"written by an earlier Forebay; .* give the task another name"):
        opened(Counted()).restore(5, encode_group([RolloutState(message=[], extra_fields={"state": {"epoch": 0}})]))


def test_a_state_of_other_content_is_refused() -> None:
    with pytest.raises(DamagedData, match="Forebay did not write it"):
        opened(Counted()).restore(5, pack_loader_state({"epoch": "first"}))


def test_a_loader_that_refuses_its_state_says_which() -> None:
    class Picky(Stateful):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError("2 workers expected")

    source = opened(Stateful())
    read(source, 3)
    picky = opened(Picky())
    for _ in range(2):
        with pytest.raises(InvalidDataset, match="cannot continue at record 3: AssertionError: 2 workers expected"):
            picky.restore(3, source.state())
        with pytest.raises(InvalidDataset, match="is at record"):
            picky.read(3)


def test_a_loader_that_fails_once_skips_nothing() -> None:
    class Fragile(Counted):
        failing = True

        def __iter__(self) -> Iterator[int]:
            for number in range(self.size):
                if number == 2 and self.failing:
                    raise OSError("connection reset")
                yield number

    loader = Fragile()
    source = opened(loader)
    read(source, 2)
    state = source.state()
    for _ in range(2):  # a generator that has raised ends: that is not the end of the epoch
        source.restore(2, state)
        with pytest.raises(InvalidDataset, match="failed at record 2: OSError: connection reset"):
            source.read(2)
    loader.failing = False
    source.restore(2, state)
    assert read(source, 4, 2) == [2, 3, 0, 1]


def test_a_loader_that_fails_at_its_first_record_can_be_tried_again() -> None:
    class Shy(Stateful):
        begun = 0

        def __iter__(self) -> Iterator[int]:
            self.begun += 1
            if self.begun == 1:
                raise OSError("not yet")
            return super().__iter__()

    source = opened(Shy())
    with pytest.raises(InvalidDataset, match="failed at record 0: OSError: not yet"):
        source.read(0)
    source.restore(0, None)
    assert read(source, 2) == [0, 1]


class Epochs:
    """Shuffles by epoch, and knows its length."""

    wraps = False

    def __init__(self) -> None:
        self.epoch, self.position, self.resumed = 0, 0, False

    def __len__(self) -> int:
        return 4

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if not self.resumed or (self.wraps and self.position == 4):
            self.position = 0
        self.resumed = False
        records = random.Random(self.epoch).sample(range(4), 4)
        while self.position < 4:
            self.position += 1
            yield records[self.position - 1] + 10 * self.epoch

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.resumed = state["position"], True


class WrappingEpochs(Epochs):
    """After the state of an epoch's end comes the next epoch, not an empty one."""

    wraps = True


class UnsizedEpochs(Epochs):
    def __len__(self) -> int:
        raise TypeError("no length")


@pytest.mark.parametrize("kind", [Epochs, WrappingEpochs, UnsizedEpochs])
@pytest.mark.parametrize("cut", range(10))
def test_a_loader_with_epochs_continues_in_the_right_one(kind: type[Epochs], cut: int) -> None:
    expected = read(opened(kind()), 14)
    assert [number // 10 for number in expected] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 2
    source = opened(kind())
    read(source, cut)
    again = opened(kind())
    again.restore(cut, source.state())
    assert read(again, 14 - cut, cut) == expected[cut:]


def test_a_batch_of_one_is_its_record() -> None:
    assert read(opened(Batches()), 2) == [{"prompt": "a"}, [{"prompt": "b"}, {"prompt": "c"}]]


class Batches:
    def __iter__(self) -> Iterator[list[dict[str, str]]]:
        return iter([[{"prompt": "a"}], [{"prompt": "b"}, {"prompt": "c"}]])


def test_the_length_of_a_loader_is_its_own_if_it_has_one() -> None:
    assert len(opened(Epochs())) == 4
    with pytest.raises(InvalidDataset, match="does not know its length"):
        len(opened(Counted()))


Point = namedtuple("Point", "x y")


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.text() | st.integers() | st.sampled_from(["forebay:int", "forebay:items", "forebay:tensor"])


@given(
    st.recursive(
        leaves, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(keys, inner), max_leaves=20
    )
)
@settings(max_examples=150, deadline=None)
def test_the_state_of_a_loader_comes_back_unchanged(state: Any) -> None:
    assert same(unpack_loader_state(pack_loader_state(state)), state)


def test_states_of_random_generators_come_back() -> None:
    generator = np.random.default_rng(5)
    state = {
        "python": random.Random(5).getstate(),
        "numpy": np.random.RandomState(5).get_state(),
        "generator": generator.bit_generator.state,  # numbers of 128 bits
        "order": np.arange(5),
        "scalar": np.int64(3),
        "point": Point(1, [2]),
    }
    back = unpack_loader_state(pack_loader_state(state))
    assert same(back["python"], state["python"])
    assert same(list(back["numpy"]), list(state["numpy"]))  # type: ignore[call-overload]
    assert back["scalar"] == 3
    assert back["point"] == (1, [2])
    back["order"][0] = 7  # its own to change
    restored = np.random.default_rng(0)
    restored.bit_generator.state = back["generator"]
    assert restored.random() == generator.random()
    random.Random().setstate(back["python"])


def test_a_state_that_is_not_plain_data_is_refused_with_its_path() -> None:
    source = opened(Stateful(extra={"lock": object()}))
    with pytest.raises(
        InvalidDataset, match=r"state of the loader .*Stateful is not plain data: .*loader\.extra\.lock"
    ):
        source.read(0)


# --- files --------------------------------------------------------------------------------------------


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_file_is_a_data_set_of_its_lines(tmp_path: Path) -> None:
    path = written(tmp_path / "d.jsonl", '{"prompt": "ä"}\n\n  \r\n{"prompt": "b"}\r\n\n{"prompt": "c"}')
    dataset = JSONLDataset(path)
    assert len(dataset) == 3
    assert [dataset[index]["prompt"] for index in range(3)] == ["ä", "b", "c"]
    for index in (-1, 3):
        with pytest.raises(IndexError):
            dataset[index]
    assert read(open_source(str(path), seed=0, shuffle=False), 4)[3] == {"prompt": "ä"}


@given(st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=30), max_size=3), max_size=8), st.booleans())
@settings(max_examples=40, deadline=None)
def test_written_records_are_read(tmp_path_factory: pytest.TempPathFactory, records: list[Any], end: bool) -> None:
    text = "\n".join(json.dumps(record) for record in records) + "\n" * end
    dataset = JSONLDataset(written(tmp_path_factory.mktemp("jsonl") / "d.jsonl", text))
    assert [dataset[index] for index in range(len(dataset))] == records


def test_nothing_is_opened_before_the_first_record(tmp_path: Path) -> None:
    path = tmp_path / "later.jsonl"
    source = opened(path)
    with pytest.raises(InvalidDataset, match=r"later\.jsonl cannot be read: No such file"):
        source.read(0)
    written(path, '{"prompt": "a"}\n')
    assert source.read(0) == (0, {"prompt": "a"})


def test_a_directory_is_not_a_data_set(tmp_path: Path) -> None:
    with pytest.raises(InvalidDataset, match="cannot be read: Is a directory"):
        opened(tmp_path).read(0)


@pytest.mark.parametrize("content", ["", "\n\n  \n"])
def test_a_file_without_records_is_empty(tmp_path: Path, content: str) -> None:
    with pytest.raises(InvalidDataset, match="JSONLDataset is empty"):
        opened(written(tmp_path / "empty.jsonl", content)).read(0)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{'prompt': 1}", "is not JSON"),
        (b'{"prompt": "cut', "is not JSON"),
        (b'{"prompt": "\xff\xfe\xfd"}', "is not JSON"),
        (b"\x00\x01\x02\x03", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"n": ' + b"9" * 5_000 + b"}", "is not JSON"),
        (b'["a"]', "is a list; expected a JSON object"),
        (b"null", "is a NoneType"),
    ],
)
def test_a_garbage_line_is_named_by_its_index(tmp_path: Path, line: bytes, said: str) -> None:
    path = written(tmp_path / "d.jsonl", b'{"prompt": "a"}\n' + line + b'\n{"prompt": "c"}\n')
    source = opened(path)
    with pytest.raises(InvalidRecord, match=said) as refused:
        source.read(1)
    assert refused.value.index == 1
    assert "d.jsonl" in str(refused.value)
    assert source.read(2) == (2, {"prompt": "c"})


@pytest.mark.parametrize("blanks", [b"", b" " * 40])
def test_a_line_beyond_the_limit_is_one_bad_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blanks: bytes
) -> None:
    monkeypatch.setattr(jsonl, "_MAX_LINE_BYTES", 32)
    long = blanks + b'{"prompt": "' + b"x" * 200 + b'"}'
    for end in (b"\n", b'\n{"prompt": "c"}\n'):
        source = opened(written(tmp_path / f"{len(end)}.jsonl", b'{"prompt": "a"}\n' + long + end))
        assert len(source) == 2 + (len(end) > 1)
        with pytest.raises(InvalidRecord, match="longer than 0 MiB") as refused:
            source.read(1)
        assert refused.value.index == 1
        if len(end) > 1:
            assert source.read(2) == (2, {"prompt": "c"})


def test_a_line_at_the_limit_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = b'{"prompt": "abc"}\n'
    monkeypatch.setattr(jsonl, "_MAX_LINE_BYTES", len(line))
    assert read(opened(written(tmp_path / "d.jsonl", line * 3)), 3) == [{"prompt": "abc"}] * 3


def test_a_file_that_changes_between_reads_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "d.jsonl", '{"prompt": "a"}\n{"prompt": "b"}\n')
    source = opened(path)
    source.read(0)
    written(path, '{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n')
    with pytest.raises(InvalidDataset, match="has changed since it was opened") as refused:
        source.read(1)
    assert not isinstance(refused.value, InvalidRecord)
    path.unlink()
    with pytest.raises(InvalidDataset, match="cannot be read: No such file") as refused:
        source.read(1)
    assert not isinstance(refused.value, InvalidRecord)
