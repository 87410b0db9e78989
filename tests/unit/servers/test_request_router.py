"""Distribution of prompts over servers that die, freeze and return at random: each prompt is answered exactly once."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from megatron_grpo.plugins.servers.plan import CALLS, chunk_size
from megatron_grpo.plugins.servers.requests import MOST_DEATHS, RequestRouter


class RandomServers:
    """Servers with random failures. Each holds at most two calls; a call answers its prompts one by one in any order."""

    def __init__(self, seed: int, *, prompts: int, servers: int, deadly: frozenset[int] = frozenset()):
        self.rng, self.deadly = random.Random(seed), deadly
        self.dealing: RequestRouter[int, str] = RequestRouter(list(range(prompts)))
        self.size = self.rng.randint(1, 8)
        self.names = [f"server {i}" for i in range(servers)]
        self.up = dict.fromkeys(self.names, True)
        self.open: list[tuple[str, tuple[int, ...], set[int]]] = []  # (server, call, what it has answered)
        self.late: list[tuple[str, int]] = []  # answers of frozen servers, which come when they thaw
        self.in_flight_at_death: Counter[int] = Counter()
        self.taken: Counter[int] = Counter()

    def run(self, events: int = 400) -> None:
        for _ in range(events):
            if self.dealing.is_done or self.dealing.deadly:
                return
            self.rng.choice([self.ask, self.ask, self.answer, self.answer, self.answer, self.die, self.freeze, self.thaw, self.refuse])()
            self.check()
        self.up = dict.fromkeys(self.names, True)  # from now on nobody fails by chance
        while not (self.dealing.is_done or self.dealing.deadly):
            self.ask()
            self.answer()
            self.check()

    def ask(self) -> None:
        free = [name for name in self.names if self.up[name] and sum(one[0] == name for one in self.open) < CALLS]
        if free and (call := self.dealing.next_for(name := self.rng.choice(free), self.size)):
            self.open.append((name, call, set()))

    def answer(self) -> None:
        if not self.open:
            return
        name, call, answered = self.rng.choice(self.open)
        key = self.rng.choice([key for key in call if key not in answered])
        if key in self.deadly:
            self.lose(name, died=True)
            return
        self.take(name, key)
        answered.add(key)
        if len(answered) == len(call):
            self.open.remove((name, call, answered))
            self.dealing.end_call(name, call)

    def take(self, name: str, key: int) -> None:
        before = self.dealing.answers.get(key)
        self.dealing.take(key, f"{name} said {key}")
        self.taken[key] += self.dealing.answers[key] != before

    def die(self) -> None:
        self.lose(self.rng.choice(self.names), died=True)

    def freeze(self) -> None:
        name = self.rng.choice(self.names)
        self.late += [(name, key) for server, call, answered in self.open if server == name for key in call if key not in answered]
        self.lose(name, died=False)

    def refuse(self) -> None:
        """It was restarted, say: it holds no weights, and says so at once."""
        self.lose(self.rng.choice(self.names), died=False)

    def thaw(self) -> None:
        """A server comes back with weights pushed anew; what it sent while nobody listened may still be read."""
        self.up[self.rng.choice(self.names)] = True
        if self.late:
            self.take(*self.late.pop(self.rng.randrange(len(self.late))))

    def lose(self, name: str, *, died: bool) -> None:
        self.up[name] = False
        for one in [one for one in self.open if one[0] == name]:
            self.open.remove(one)
            if died:
                self.in_flight_at_death.update(key for key in one[1] if key not in self.dealing.answers)
            self.dealing.end_call(name, one[1], is_lost=died)

    def check(self) -> None:
        held = [key for _, call, answered in self.open for key in call if key not in answered and key not in self.dealing.answers]
        assert len(held) == len(set(held)), "a prompt lies with two servers"
        waiting = set(self.dealing._waiting)
        assert not waiting & set(held)
        assert waiting | set(held) | set(self.dealing.answers) == set(range(len(self.dealing._keys))), "a prompt is nowhere"
        assert {key: len(servers) for key, servers in self.dealing.deaths.items()} == {
            key: count for key, count in self.in_flight_at_death.items() if count
        }


@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_router_answers_every_prompt_once_for_any_server_failures(first):
    ends = Counter()
    for seed in range(first, first + 100):
        world = RandomServers(seed, prompts=seed % 40, servers=1 + seed % 4)
        world.run()
        assert set(world.taken.values()) <= {1}
        assert world.dealing.is_done or all(world.in_flight_at_death[key] == MOST_DEATHS for key in world.dealing.deadly)
        assert sorted([*world.dealing.answers, *world.dealing.left]) == list(range(seed % 40))
        ends[world.dealing.is_done] += 1
    assert ends[True] and ends[False]  # both happen


@pytest.mark.parametrize("seed", range(100))
def test_router_isolates_prompt_that_kills_servers_after_three_deaths(seed):
    """Nobody dies by chance: so whoever is named kills, and three servers are all that it costs."""
    world = RandomServers(seed, prompts=30, servers=4, deadly=frozenset({seed % 30}))
    deaths = 0
    while not (world.dealing.is_done or world.dealing.deadly):
        for name in world.names:
            world.up[name] = True  # each comes back before the next question
        before = len(world.open)
        world.ask()
        world.ask()
        world.answer()
        world.check()
        deaths += len(world.open) < before
    assert world.dealing.deadly == [seed % 30] and world.in_flight_at_death[seed % 30] == MOST_DEATHS
    assert world.dealing.next_for("another server", 8) == ()


def test_router_sends_suspected_prompt_alone():
    dealing: RequestRouter[str, int] = RequestRouter(["a", "b", "c"])
    for _ in range(2):
        dealing.end_call("one", dealing.next_for("one", 1), is_lost=True)
    assert dealing.deaths == {"a": ["one", "one"]}
    assert dealing.next_for("two", 2) == ("b", "c")
    assert dealing.next_for("two", 2) == ()  # it has something else
    assert dealing.next_for("one", 2) == ("a",)
    dealing.end_call("two", ("b", "c"))
    assert dealing.next_for("one", 2) == () and dealing.next_for("two", 2) == ("b", "c")


@pytest.mark.parametrize(
    ("prompts", "n", "servers", "max_num_seqs", "size"),
    [(1000, 8, 2, 256, 32), (32, 8, 2, 256, 8), (3, 8, 4, 256, 1), (100, 8, 1, 4, 1), (0, 1, 1, 1, 1), (64, 4, 1, 64, 16)],
)  # fmt: skip
def test_chunk_size_fills_a_server_and_leaves_prompts_for_others(prompts, n, servers, max_num_seqs, size):
    assert chunk_size(prompts, n=n, num_servers=servers, max_num_seqs=max_num_seqs) == size
