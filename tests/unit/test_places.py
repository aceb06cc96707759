"""Places for connections, with the test's clock: who loses its place in a crowd."""

from __future__ import annotations

from pipeswitch.base.quotas import CLAIMS_S, Claim, Places


class Crowd:
    """Connections are numbers; ``since_s`` has the time of each one's last activity."""

    def __init__(self, size: int, size_per_address: int) -> None:
        self.places = Places[int](size, size_per_address, self._claim)
        self.since_s: dict[int, float] = {}
        self.answered: set[int] = set()
        self.busy: set[int] = set()
        self.evicted: list[int] = []
        self.compared = 0

    def _claim(self, one: int, now_s: float) -> Claim | None:
        self.compared += 1
        return None if one in self.busy else (one in self.answered, self.since_s[one])

    def enter(self, one: int, address: str = "a", now_s: float = 0.0) -> bool:
        self.since_s[one] = now_s
        return self.places.enter(one, address, now_s, self.evicted.append)


def test_the_longest_idle_connection_of_a_crowded_address_loses_its_place() -> None:
    crowd = Crowd(3, 2)
    assert [crowd.enter(one, now_s=one) for one in range(3)] == [True] * 3
    assert crowd.evicted == [0]
    crowd.busy |= {1, 2}
    assert not crowd.enter(3, now_s=5.0)
    assert crowd.enter(4, "b", 6.0)
    assert crowd.enter(5, "c", 7.0)  # all places are taken
    assert crowd.evicted == [0, 4]
    for one in range(6):
        crowd.places.leave(one)
    assert (len(crowd.places.addresses), crowd.places.by_address) == (0, {})


def test_a_connection_that_has_had_an_answer_stays_longest() -> None:
    crowd = Crowd(10, 2)
    crowd.answered.add(0)
    assert [crowd.enter(one, now_s=one) for one in range(4)] == [True] * 4
    assert crowd.evicted == [1, 2]
    crowd.busy.add(3)
    assert crowd.enter(4, now_s=5.0)
    assert crowd.evicted == [1, 2, 0]


def test_a_crowd_that_comes_fast_is_compared_once_and_the_oldest_go_first() -> None:
    crowd = Crowd(1000, 100)
    crowd.answered.add(0)
    for one in range(100):
        crowd.enter(one, now_s=one)
    for one in range(40):
        assert crowd.enter(100 + one, now_s=200.0 + one * CLAIMS_S / 50)
        crowd.since_s[4] = 150.0  # it is active
    assert crowd.compared <= 100 + 40
    assert crowd.evicted == [one for one in range(1, 42) if one != 4]


def test_two_crowded_addresses_are_compared_once_each() -> None:
    crowd = Crowd(1000, 20)
    for one in range(40):
        crowd.enter(one, "ab"[one % 2])
    for one in range(20):
        assert crowd.enter(100 + one, "ab"[one % 2], 10.0)
    assert crowd.compared <= 2 * 20 + 20


def test_candidates_expire() -> None:
    crowd = Crowd(1000, 1)
    crowd.enter(0)
    crowd.busy.add(0)
    assert not crowd.enter(1, now_s=10.0)
    crowd.busy.clear()
    assert not crowd.enter(1, now_s=10.0 + CLAIMS_S / 2)
    assert crowd.enter(1, now_s=10.0 + CLAIMS_S)
