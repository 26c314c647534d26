"""Defects of ranks that are reached over a network. Those of keys stay silent until they are used."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

CHANNEL = "dflash_backend/parallel/channel.py"
REMOTE = "dflash_backend/parallel/remote.py"
SUM = "dflash_backend/parallel/sums.py"
RAY = "dflash_backend/parallel/ray_ranks.py"
CHANNEL_TESTS = ("tests/parallel/test_rank_channel.py",)
SUM_TESTS = ("tests/parallel/test_network_sum.py",)
RANKS = "tests/parallel/test_remote_ranks.py::"
RAY_TESTS = "tests/parallel/test_ray_ranks.py::"

REMOTE_RANK_MUTANTS = (
    *mutants_of(
        CHANNEL,
        CHANNEL_TESTS,
        ("a socket takes messages from any key", "return key in self.known_keys", "return True"),
        ("a socket takes messages without keys", "socket.curve_server = True", "socket.curve_server = False"),
        (
            "silence is no end of a connection",
            "socket.heartbeat_timeout = int(silence_s * 1000)",
            "socket.heartbeat_timeout = 0",
        ),
    ),
    *mutants_of(
        SUM,
        SUM_TESTS,
        (
            "terms that came over the network are added from the last on",
            "tuple(terms.view(size, part)), own",
            "tuple(terms.view(size, part).flip(0)), own",
        ),
        (
            "few terms that came over the network are added from the last on",
            "add_terms(self._gathered(x), x)",
            "add_terms(self._gathered(x)[::-1], x)",
        ),
        ("only the first piece is summed", "self._add(flat[first : first + step])", "self._add(flat[:step])"),
        (
            "a lost rank is waited for in a sum over the network",
            "if reason := self._lost():\n                    raise SumError(reason)",
            "if reason := '':\n                    raise SumError(reason)",
        ),
        (
            "a sum that is complete when a wait for it gives up has failed",
            "if is_completed:",
            "if work.is_completed():",
        ),
        (
            "a sum that has failed is waited for",
            "if is_completed:",
            "if False:",
        ),
        ("a lost rank is looked for every few hours", "timedelta(seconds=LOOK_S)", "timedelta(LOOK_S)"),
        ("a rank is waited for in a sum for ever", "if time.monotonic() > deadline:", "if False:"),
    ),
    *mutants_of(
        REMOTE,
        (f"{RANKS}test_the_loss_of_a_rank_ends_the_engine_and_is_named",),
        ("the end of a rank's connection is not noticed", "if rank := self._ended_rank():", "if rank := 0:"),
        (
            "silence of a machine is waited for as that of a process",
            "address.port, address.key, NETWORK_SILENCE_S)",
            "address.port, address.key, HANG_S)",
        ),
        ("a machine that is silent is said to have ended", "if is_silent else", "if False else"),
        (
            "a lost rank is named by the next one's node",
            "self._addresses[rank - 1].node",
            "self._addresses[rank % len(self._addresses)].node",
        ),
    ),
    Mutant(
        "a rank loads other weights than rank 0",
        "dflash_backend/parallel/alike.py",
        "if own.checkpoint != of_rank_0.checkpoint:",
        "if False:",
        (f"{RANKS}test_a_rank_whose_machine_has_other_files_does_not_start",),
    ),
    Mutant(
        "ranks on unlike machines choose experts each",
        "dflash_backend/parallel/alike.py",
        "if own != of_rank_0:",
        "if False:",
        (f"{RANKS}test_a_rank_that_computes_otherwise_does_not_choose_experts",),
    ),
    Mutant(
        "rank 0 does not sleep while ranks start, once one has ended",
        REMOTE,
        "            self._poller.unregister(ended)  # it",
        "            pass  # it",
        (f"{RANKS}test_a_rank_that_ends_is_told_while_another_one_loads",),
    ),
    Mutant(
        "a rank that is slow is lost",
        "dflash_backend/parallel/links.py",
        "HANG_S = 10.0",
        "HANG_S = 3.5",
        (f"{RANKS}test_a_rank_that_is_only_slow_is_not_lost",),
    ),
    Mutant(
        "a rank outlives its engine",
        "dflash_backend/parallel/remote.py",
        "    os._exit(1)\n",
        "    return\n",
        (f"{RANKS}test_ranks_end_with_an_engine_that_is_killed",),
    ),
    Mutant(
        "why a rank failed stays on its machine",
        "dflash_backend/parallel/rank.py",
        'rank_zero.send(RankFailed(f"{type(error).__name__}: {error}"))',
        "pass",
        (f"{RANKS}test_what_a_rank_fails_of_is_told",),
    ),
    Mutant(
        "an idle engine does not ask for its ranks",
        "dflash_backend/engine/process.py",
        "                self._check()\n",
        "                pass\n",
        ("tests/engine/test_process.py",),
    ),
    Mutant(
        "a cluster that does not answer is waited for",
        RAY,
        "        _check_address()\n",
        "",
        (f"{RAY_TESTS}test_an_address_at_which_no_cluster_answers_is_refused_at_once",),
    ),
    Mutant(
        "ranks on one node take all of its cores each",
        RAY,
        "return self._on_node[rank]",
        "return 1",
        (f"{RAY_TESTS}test_more_ranks_than_nodes_share_nodes_and_their_cores",),
    ),
    Mutant(
        "rank 0 takes all cores of its machine",
        "dflash_backend/parallel/group.py",
        "self._num_sharers(0))",
        "1)",
        (f"{RANKS}test_each_rank_has_its_share_of_the_cores_of_its_own_machine",),
    ),
    Mutant(
        "a rank's cores are those of a machine that it is not on",
        "dflash_backend/parallel/group.py",
        "self._num_sharers(rank),",
        "self._num_sharers(0),",
        (f"{RANKS}test_each_rank_has_its_share_of_the_cores_of_its_own_machine",),
    ),
    Mutant(
        "each rank needs a node of its own",
        RAY,
        'else "SPREAD"',
        'else "STRICT_SPREAD"',
        (f"{RAY_TESTS}test_one_node_with_cpus_enough_has_all_ranks",),
    ),
    Mutant(
        "ranks crowd on one node beside an empty one",
        RAY,
        'else "SPREAD"',
        'else "PACK"',
        (f"{RAY_TESTS}test_ranks_on_two_nodes_give_the_text_of_one_and_leave_nothing",),
    ),
)
