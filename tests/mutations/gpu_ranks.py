"""Defects of ranks on GPUs. A machine with several shows most of them as a hang, or as worse text."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

PEERS = "dflash_backend/parallel/gpu.py"
FOLLOWER = "dflash_backend/parallel/gpu.py"
MESSAGES = "dflash_backend/parallel/gpu.py"
SUM = "dflash_backend/parallel/nccl.py"
NCCL = "dflash_backend/parallel/nccl.py"
SIZING = "dflash_backend/engine/sizing.py"
GRAPHS = "dflash_backend/worker/graphs.py"
RANK = "dflash_backend/parallel/rank.py"
LOCAL = "dflash_backend/parallel/local.py"
ENGINES = "tests/parallel/test_gpu_ranks.py::"
TEXT = (f"{ENGINES}test_replayed_graphs_of_two_ranks_give_the_text_of_one",)
SUM_TESTS = ("tests/parallel/test_gpu_sum.py",)
START = "tests/parallel/test_gpu_start.py::"
BLOCKS = (
    f"{ENGINES}test_all_ranks_have_as_many_blocks_as_the_one_with_the_least_memory_holds",
    f"{ENGINES}test_a_named_size_is_the_whole_caches_and_must_fit_on_each_rank",
)

GPU_RANK_MUTANTS = (
    *mutants_of(
        PEERS,
        TEXT,
        (
            "a half of a step without passes is replayed on ranks that have none",
            "kept[0] = completed and self._ranks.num_sent > before",
            "kept[0] = completed",
        ),
        ("all graphs of ranks have one number", "self._num_graphs, self._num_graphs + 1", "0, 1"),
        ("ranks are not told of a replay", "self._send(Replay(number))", "pass"),
    ),
    Mutant(
        "rank 0's free memory alone decides on a graph",
        PEERS,
        "return min(row[0] for row in self._reports(ReportFree(), [num_bytes]))",
        "return self._reports(ReportFree(), [num_bytes])[0][0]",
        (f"{ENGINES}test_least_free_memory_of_all_ranks_decides_on_a_graph",),
    ),
    *mutants_of(
        FOLLOWER,
        TEXT,
        (
            "a rank keeps the KV cache of one block",
            "self._follower.take_kv(self._allocate(message.num_blocks))",
            "self._follower.take_kv(self._allocate(1))",
        ),
        ("what is captured on a rank is thrown away", "self._graphs[number] = graph", "self._graphs[0] = graph"),
    ),
    Mutant(
        "ranks compile their kernels when requests come",
        FOLLOWER,
        "if message.every:",
        "if False:",
        (f"{ENGINES}test_all_kernels_are_compiled_on_all_ranks",),
    ),
    *mutants_of(
        MESSAGES,
        SUM_TESTS,
        ("tensors of a message overlap where their sizes are odd", "first += _aligned(size)", "first += size"),
        ("a tensor that is no row of memory is sent as it lies", "[tensor.contiguous() for", "[tensor for"),
    ),
    *mutants_of(
        SUM,
        SUM_TESTS,
        (
            "terms on GPUs are added in NCCL's order",
            "self._ordered = ordered and shard.size > 2",
            "self._ordered = False",
        ),
        ("sums that differ between ranks are served", "if any(not torch.equal(row, rows[0])", "if any(False"),
        ("a rank that is lost is waited for while ranks meet", "if reason := lost():", "if reason := '':"),
        ("work that waits for a lost rank is left alone", "os._exit(1)", "pass"),
    ),
    Mutant(
        "the thread that meets other ranks is on the first GPU",
        SUM,
        "torch.cuda.set_device(device)",
        "pass",
        (f"{START}test_a_rank_meets_the_others_by_rank_0s_id_and_on_its_own_gpu",),
    ),
    Mutant(
        "a collective has its numbers of another type",
        NCCL,
        "torch.float32: 7,",
        "torch.float32: 6,",
        ("tests/parallel/test_nccl.py",),
    ),
    Mutant(
        "a group of ranks that was ended is asked all the same",
        NCCL,
        "if self._is_aborted:",
        "if False:",
        ("tests/parallel/test_nccl.py",),
    ),
    *mutants_of(
        SIZING,
        BLOCKS,
        ("rank 0's memory alone counts", "key=blocks.__getitem__", "key=lambda number: number"),
        (
            "each rank counts the drafter's KV",
            "[own] + [dataclasses.replace(own, draft=None)]",
            "[own] + [own]",
        ),
        ("a named size is not looked at", "if sizes.num_blocks > blocks[least]:", "if False:"),
    ),
    *mutants_of(
        GRAPHS,
        (f"{START}test_ranks_run_a_step_before_it_is_captured_and_replay_their_graph_before_rank_0",),
        (
            "a graph is launched before other ranks hear of it",
            "self._there[part]()\n        self._graphs[part].replay()",
            "self._graphs[part].replay()\n        self._there[part]()",
        ),
        ("a step with collectives is captured at its first run", "model.run(replace(inputs))", "pass"),
    ),
    Mutant(
        "a rank loads before it has its GPU",
        RANK,
        'if setup.device.type == "cuda":  # before',
        "if False:  # before",
        (f"{START}test_a_rank_is_on_its_gpu_before_it_loads",),
    ),
    Mutant(
        "a rank that fails of what is not expected dies without a word",
        RANK,
        "run_message = _load(setup, sums)\n    except Exception as error:",
        "run_message = _load(setup, sums)\n    except RuntimeError as error:",
        (f"{START}test_a_rank_that_fails_of_anything_at_its_start_says_so",),
    ),
    Mutant(
        "other ranks ask for the memory of their KV while they serve",
        RANK,
        "        kv.claim()  # a server",
        "        pass  # a server",
        (f"{ENGINES}test_a_rank_claims_the_memory_of_its_kv_before_it_is_ready",),
    ),
    Mutant(
        "a rank meets the others before they have loaded",
        RANK,
        "        rank_zero.receive()  # `Join`\n        join()\n",
        "        join()\n        rank_zero.receive()\n",
        (f"{START}test_a_rank_meets_the_others_once_rank_0_says_that_all_have_loaded",),
    ),
    *mutants_of(
        LOCAL,
        (
            f"{START}test_what_waits_for_a_killed_rank_on_the_gpu_is_ended",
            f"{START}test_an_engine_that_ends_leaves_nccl_alone",
        ),
        ("what waits for a killed rank on the GPU goes on", "self._gpu_sum.abort()", "pass"),
        ("an engine that ends aborts NCCL", "is not None and not was_ended:", "is not None:"),
    ),
    Mutant(
        "a step of a lost rank gives its numbers",
        "dflash_backend/worker/runner.py",
        "self.model.target.peers.check()",
        "pass",
        (f"{ENGINES}test_a_step_of_a_lost_rank_gives_no_tokens",),
    ),
)
