"""The memory of a classifier against slow loops, and bit for bit against memories that never saw what it forgot."""

import pickle
import threading
import time

import numpy as np
import pytest

from fastweights.classifier.errors import InputError
from fastweights.classifier.memory import Memory, listed, unit
from fastweights.utils.errors import UserError

WIDTH = 6


def random_keys(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, WIDTH)).astype(np.float32)


def filled(labels: str = "abacbbcaab", seed: int = 0) -> Memory:
    memory = Memory(WIDTH)
    memory.add(random_keys(len(labels), seed), list(labels))
    return memory


def assert_same(one: Memory, other: Memory) -> None:
    """Not nearly: every number."""
    assert one.labels == other.labels
    for name in ("keys", "class_of", "counts", "sums"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    queries = unit(random_keys(5, seed=9))
    np.testing.assert_array_equal(one.cosines(queries), other.cosines(queries))


def test_cosines_are_those_of_a_slow_loop() -> None:
    keys, labels, queries = random_keys(10), "abacbbcaab", random_keys(4, seed=1)
    found = filled(labels).cosines(unit(queries))
    for q, query in enumerate(queries.astype(float)):
        for column, label in enumerate("abc"):
            total = np.zeros(WIDTH)
            for key, known in zip(keys.astype(float), labels, strict=True):
                if known == label:
                    total += key / np.sqrt((key * key).sum())
            expected = (query * total).sum() / np.sqrt((query * query).sum()) / np.sqrt((total * total).sum())
            assert found[q, column] == pytest.approx(expected, abs=1e-6)


def test_a_large_memory_answers_as_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, queries = filled(), unit(random_keys(4, seed=1))
    exact = memory.cosines(queries)
    monkeypatch.setattr("fastweights.classifier.memory.EXACT", 0)
    assert exact.dtype == np.float64
    np.testing.assert_allclose(memory.cosines(queries), exact, atol=1e-6)


def test_classes_come_in_order_and_examples_have_their_names() -> None:
    memory = Memory(WIDTH)
    memory.add(random_keys(3), ["z", "a", "z"], ["1.png", "2.png", "3.png"])
    memory.add(random_keys(1), ["m"])
    assert memory.labels == ["z", "a", "m"]
    assert memory.counts.tolist() == [2, 1, 1]
    assert memory.names == ["1.png", "2.png", "3.png", "3"]
    assert (len(memory), memory.classes) == (4, 3)


def test_adding_is_in_place_and_all_at_once_is_one_by_one() -> None:
    together, one_by_one = filled(), Memory(WIDTH)
    for key, label in zip(random_keys(10), "abacbbcaab", strict=True):
        one_by_one.add(key[None], [label])
    assert_same(one_by_one, together)


def test_adding_takes_the_same_time_however_much_is_stored() -> None:
    memory = Memory(WIDTH)
    memory.add(random_keys(200_000), list(range(1000)) * 200)
    room = memory._keys
    memory.add(random_keys(1), [3])
    assert memory._keys is not room  # makes room for as many again ...
    room, times = memory._keys, []
    for _ in range(20):
        begin = time.perf_counter()
        memory.add(random_keys(1), [3])
        times.append(time.perf_counter() - begin)
    assert memory._keys is room  # ... and has it from then on
    assert sorted(times)[10] < 0.005


@pytest.mark.parametrize("label", ["a", "b", "c"])
def test_a_forgotten_class_was_never_there(label: str) -> None:
    memory, labels = filled(), "abacbbcaab"
    memory.forget(label)
    kept = [place for place, known in enumerate(labels) if known != label]
    never = Memory(WIDTH)
    never.add(random_keys(10)[kept], [labels[place] for place in kept])
    assert_same(memory, never)
    assert memory.names == [str(place) for place in kept]


@pytest.mark.parametrize("number", [2, 4, 9])
def test_a_forgotten_example_was_never_there(number: int) -> None:
    memory, labels = filled(), "abacbbcaab"
    assert memory.forget_example(str(number)) == labels[number]
    kept = [place for place in range(10) if place != number]
    never = Memory(WIDTH)
    never.add(random_keys(10)[kept], [labels[place] for place in kept])
    assert_same(memory, never)


def test_a_class_goes_with_its_last_example_and_may_come_again() -> None:
    memory = filled("abca")
    assert memory.forget_example("1") == "b"
    assert memory.labels == ["a", "c"]
    memory.add(random_keys(1, seed=3), ["b"])
    assert memory.labels == ["a", "c", "b"]
    for label in "abc":
        memory.forget(label)
    assert (len(memory), memory.classes) == (0, 0)
    memory.add(random_keys(10), list("abacbbcaab"))
    assert_same(memory, filled())


def test_days_of_adding_and_forgetting_leave_no_trace() -> None:
    draw, memory = np.random.default_rng(0), Memory(WIDTH)
    kept: list[tuple[int, str, np.ndarray]] = []
    for number in range(300):
        key, label = draw.normal(size=(1, WIDTH)).astype(np.float32), str(draw.integers(8))
        memory.add(key, [label])
        kept.append((number, label, key))
        if draw.random() < 0.6:
            gone = kept[int(draw.integers(len(kept)))]
            if draw.random() < 0.1:
                memory.forget(gone[1])
                kept = [one for one in kept if one[1] != gone[1]]
            else:
                memory.forget_example(str(gone[0]))
                kept = [one for one in kept if one[0] != gone[0]]
    assert 10 < len(kept) < 200
    never = Memory(WIDTH)
    for _, label, key in kept:
        never.add(key, [label])
    assert memory.names == [str(number) for number, _, _ in kept]
    for label in never.labels:  # a class that was emptied has a later place: compared by name
        a, b = memory.index(label), never.index(label)
        np.testing.assert_array_equal(memory.sums[a], never.sums[b])
        assert memory.counts[a] == never.counts[b]


def test_no_two_examples_are_called_alike_though_others_were_forgotten() -> None:
    memory = filled("aabb")
    memory.forget_example("1")
    memory.add(random_keys(1), ["a"])
    assert memory.names == ["0", "2", "3", "4"]
    again = Memory(WIDTH)
    again.restore(memory.keys, memory.class_of, memory.labels, memory.names)
    again.add(random_keys(1), ["a"])
    assert again.names[-1] == "5"


def test_what_is_refused_changes_nothing() -> None:
    memory = filled()
    for refused in (
        lambda: memory.add(random_keys(2), ["new", []]),  # type: ignore[list-item]
        lambda: memory.add(random_keys(2), ["new"]),
        lambda: memory.add(random_keys(1)[:, :3], ["new"]),
        lambda: memory.forget("new"),
        lambda: memory.forget_example("new"),
    ):
        with pytest.raises((TypeError, ValueError)):
            refused()
    assert_same(memory, filled())
    for wrong in (lambda: memory.forget("x"), lambda: memory.forget_example("x.png")):
        with pytest.raises(InputError, match=r"^there is no (class|example) 'x.*\.$") as raised:
            wrong()
        assert isinstance(raised.value, UserError)
        assert isinstance(raised.value, ValueError)


def test_ten_thousand_classes() -> None:
    keys, memory = random_keys(10_000), Memory(WIDTH)
    memory.add(keys, [f"class {number}" for number in range(10_000)])
    found = memory.cosines(unit(keys[::100]))
    assert found.shape == (100, 10_000)
    assert (found.argmax(1) == np.arange(0, 10_000, 100)).all()
    memory.forget("class 5000")
    assert memory.classes == 9999
    assert memory.labels[5000] == "class 5001"
    assert memory.cosines(unit(keys[[5001]])).argmax() == 5000


def test_contributions_add_up_to_the_cosine_and_the_largest_comes_first() -> None:
    memory, key = filled(), unit(random_keys(1, seed=4))
    for column, label in enumerate(memory.labels):
        parts = memory.contributions(key[0], label)
        assert sum(part for _, part in parts) == pytest.approx(memory.cosines(key)[0, column], abs=1e-6)
        assert [part for _, part in parts] == sorted((part for _, part in parts), reverse=True)
        assert {name for name, _ in parts} == {str(n) for n, one in enumerate("abacbbcaab") if one == label}


def test_each_example_is_asked_without_itself() -> None:
    labels = "abacbbcaabd"
    memory = filled(labels)
    asked = memory.askable
    assert asked.tolist() == list(range(10))  # the only example of d cannot be
    for place, row in zip(asked, memory.left_out(asked), strict=True):
        without = filled(labels)
        without.forget_example(str(place))
        np.testing.assert_allclose(row, without.cosines(unit(random_keys(11))[[place]])[0], atol=1e-5)


def test_a_pickled_memory_goes_on_where_it_was() -> None:
    memory = filled()
    copy = pickle.loads(pickle.dumps(memory))
    assert_same(copy, memory)
    for one in (memory, copy):
        one.add(random_keys(1, seed=5), ["new"])
        one.forget("b")
    assert_same(copy, memory)


def test_readers_see_some_state_that_was_while_others_add() -> None:
    """One thread adds and forgets, others read: every answer is that of some moment between two changes."""
    keys, query = random_keys(120, seed=2), unit(random_keys(1, seed=3))
    steps = [(keys[number][None], f"class {number % 30}") for number in range(120)]
    serial, memory, moments = filled(), filled(), set()

    def change(one: Memory, number: int) -> None:
        one.add(*[steps[number][0], [steps[number][1]]])
        if number % 3 == 2:
            one.forget(steps[number - 1][1])

    def state(one: Memory) -> bytes:
        with one.unchanged():
            return one.cosines(query).tobytes() + one.counts.tobytes() + "".join(map(str, one.labels)).encode()

    moments.add(state(serial))
    for number in range(120):
        serial.add(steps[number][0], [steps[number][1]])
        moments.add(state(serial))
        if number % 3 == 2:
            serial.forget(steps[number - 1][1])
            moments.add(state(serial))
    seen: list[bytes] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.append(state(memory))
            assert memory.cosines(query).shape[0] == 1

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(120):
        change(memory, number)
        time.sleep(0.0005)
    done.set()
    for reader in readers:
        reader.join()
    assert len(seen) > 20
    assert set(seen) <= moments
    assert_same(memory, serial)


def test_adding_from_many_threads_loses_nothing() -> None:
    memory = Memory(WIDTH)

    def work(number: int) -> None:
        for label in range(50):
            memory.add(random_keys(1, seed=number), [label])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert memory.counts.tolist() == [4] * 50
    assert sorted(map(int, memory.names)) == list(range(200))


def test_keys_of_zeros_stay_zeros_and_lists_stay_short() -> None:
    assert not unit(np.zeros((2, 3))).any()
    assert listed(list("abc"), 2) == "a, b and 1 more"
    assert listed([]) == "none"


@pytest.mark.parametrize("width", [1, 3, 8, 64, 512])
def test_what_has_the_length_one_is_not_normalised_again(width: int) -> None:
    """So that keys that are taken over from elsewhere are the very same."""
    once = unit(np.random.default_rng(0).normal(size=(20_000, width)) * 3)
    np.testing.assert_allclose(np.linalg.norm(once.astype(np.float64), axis=1), 1, atol=1.2e-7)
    assert unit(once).tobytes() == once.tobytes()
    assert unit(once.astype(np.float64)).tobytes() == once.tobytes()
    with np.errstate(over="raise"):
        np.testing.assert_allclose(np.linalg.norm(unit(once * 1e30), axis=1), 1, atol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(unit(once.astype(np.float64) * 1e200), axis=1), 1, atol=1e-6)
