"""Defects of KV in tiers: a block that is lost, found too early, or of another text."""

from __future__ import annotations

from tests.mutations.mutant import Mutant, mutants_of

TIERS = "dflash_backend/core/kv/tiers.py"
SLOTS = "dflash_backend/core/kv/record_slots.py"
TRANSFER = "dflash_backend/core/kv/transfer.py"
SERVER = "dflash_backend/worker/kv_transfer.py"
MANAGER = "dflash_backend/core/kv/manager.py"
GROUPS = "dflash_backend/core/kv/groups.py"
SCHEDULER = "dflash_backend/core/scheduler.py"
MOVER = "dflash_backend/worker/kv_mover.py"
DISK = "dflash_backend/worker/kv_disk.py"
ENGINE = "dflash_backend/engine/kv_tiers.py"
OF_CORE = (
    "tests/core/test_kv_tiers.py",
    "tests/core/test_core_random.py::test_tiers_give_back_what_they_were_given_in_random_traffic",
)
OF_WORKER = ("tests/worker/test_kv_tiers.py",)
OF_DISK = ("tests/worker/test_kv_disk.py",)
OF_TRANSFER = ("tests/core/test_kv_transfer.py",)
OF_SERVER = ("tests/worker/test_kv_transfer.py",)
OF_MOVER = ("tests/worker/test_kv_mover.py",)
OF_NIXL = ("tests/worker/test_kv_nixl.py",)
OF_FINGERPRINT = ("tests/engine/test_kv_fingerprint.py",)

KV_TIER_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "KV of another rotary scaling is found again",
        ENGINE,
        '        "rope_scaling": config.target_rope,\n',
        "",
        OF_FINGERPRINT,
    ),
    *mutants_of(
        TIERS,
        OF_CORE,
        (
            "a copy of a block that left the cache meanwhile is taken",
            "arrived = arrived and key not in self._void",
            "arrived = bool(arrived)",
        ),
        (
            "a load holds no lookahead for a block drafter",
            "0 if config.autoregressive else config.lookahead[-1]",
            "0",
        ),
        (
            "a load holds a lookahead for an autoregressive drafter too",
            "0 if config.autoregressive else config.lookahead[-1]",
            "config.lookahead[-1]",
        ),
        (
            "what could be computed sooner is loaded",
            "if not seconds_per_token or load_s <",
            "if True or load_s <",
        ),
        (
            "one plan lets all requests wait for a load",
            "return self._num_sought >= MAX_BLOCKS_SOUGHT",
            "return False",
        ),
        (
            "what there is not to load is looked for in each plan",
            "request.nothing_to_load_at = versions",
            "pass",
        ),
        ("one slow load switches a tier off", "if number > most:", "if False:"),
        ("a probe is one load among many", "now if move.source in self._probed else ", ""),
        (
            "each of the requests with a prefix loads it",
            "if coming is not None:",
            "if coming is not None and not hit and request.has_loaded:",
        ),
        (
            "what a request found on the device grows old in the tier",
            "            tier.groups[group].touch(block_hash, reused)\n",
            "",
        ),
        (
            "what a tier could not give is found there again",
            "elif number in moved.missing and tier is not self.remote:",
            "elif number in moved.missing and not record:",
        ),
        (
            "a load under way stays when its blocks are needed",
            "            self._mover.cancel(frozenset(self._load_of))\n",
            "",
        ),
        (
            "what is loaded for a request that is gone is held for ever",
            "        if load.given_up:\n            self._let_go(load)\n        else:",
            "        if not load.given_up:",
        ),
        (
            "host memory loses what waits for the disk",
            "            self.tiers[number - 1].groups[group].pin(block_hash)  # until it is in the tier below\n",
            "            self.tiers[number - 1].groups[group].pin(block_hash)\n            self._drop(number, key)\n",
        ),
        (
            "a slow disk keeps all of host memory",
            "max(0, num_over)",
            "0",
        ),
        (
            "an event of a tier says that the device has the block",
            "self._events.moved(block_hash, MEDIUMS[tier.name], stored)",
            'self._events.moved(block_hash, "GPU", stored)',
        ),
    ),
    *mutants_of(
        SLOTS,
        OF_CORE,
        (
            "a record that is read may be given away",
            "self._pinned[block_hash] = records.pop(block_hash), records is self._used",
            "pass",
        ),
    ),
    *mutants_of(
        TIERS,
        OF_TRANSFER,
        (
            "a decode server does not say what it does not need",
            "                self._tell(peer)\n",
            "                pass\n",
        ),
        (
            "a failed step gives up what queued requests are to fetch",
            "if not comes_back and request.has_remote_kv and",
            "if request.has_remote_kv and",
        ),
        (
            "what is kept for another server stays when requests need its blocks",
            "return self.kept is not None and self.kept.evict_oldest()",
            "return False",
        ),
    ),
    *mutants_of(
        TRANSFER,
        OF_TRANSFER,
        (
            "a prompt can be read before its drafter's KV is written",
            "        self._sender.keep(kept)\n",
            "        self._sender.keep(kept)\n        self._sender.ready(number)\n",
        ),
        (
            "what has lost a record can still be read",
            "            self._sender.withdraw(number)\n            self._broken",
            "            self._broken",
        ),
        (
            "what is kept holds no block",
            "slots = group.hold(-number, needed, 0)",
            "slots = [(group.slot(each), False) for each in needed]",
        ),
        (
            "what nobody fetches is kept for ever",
            "next(iter(self._keeping.values()))[1] <= now",
            "next(iter(self._keeping.values()))[1] <= 0",
        ),
        (
            "the last block of a prompt is kept too, which no hit can use",
            "end = (request.num_prompt_tokens - 1) // self._block_size\n        hashes",
            "end = request.num_prompt_tokens // self._block_size\n        hashes",
        ),
    ),
    *mutants_of(
        "frontend/dflash_openai/triton_pool.py",
        ("tests/frontend/test_pool.py",),
        (
            "a prefill server is asked for what the client has of another one",
            "if not servers or is_own or len(token_ids) < MIN_PREFILL_TOKENS:",
            "if not servers or len(token_ids) < MIN_PREFILL_TOKENS:",
        ),
        (
            "a prefill server decodes a whole answer",
            'own |= {"max_tokens": 1, ',
            "own |= {",
        ),
    ),
    *mutants_of(
        SERVER,
        OF_SERVER,
        ("servers on any machine are trusted without peers", "if not self._peers:", "if not self._peers and False:"),
        ("peers that are named do not end with the host", '("*", peer.host, f"{peer.host}:{peer.port}")', '("*",)'),
        (
            "what was given up while it was read is used",
            "is_kept = self._kept.pop(one.kept.number, None) is not None",
            "is_kept = True",
        ),
        (
            "servers with other settings exchange KV",
            "if (difference := self._facts.difference(ask.facts)) is not None:",
            "if (difference := self._facts.difference(self._facts)) is not None:",
        ),
        (
            "a server that drips holds a request for ever",
            "        if time.monotonic() > until:\n",
            "        if until < 0:\n",
        ),
        (
            "a read that waits cannot be stopped",
            "                connection.shutdown(socket.SHUT_RDWR)\n\n    def _fail",
            "                pass\n\n    def _fail",
        ),
    ),
    *mutants_of(
        SERVER,
        OF_NIXL,
        (
            "a read that was given up writes into the next record",
            "        self._buffers.array = None\n",
            "",
        ),
        (
            "reads that do not end take all memory",
            "        if transport is not None and transport.is_broken:\n            transport = None\n",
            "",
        ),
    ),
    *mutants_of(
        GROUPS,
        OF_CORE,
        (
            "the head of a prompt goes to a tier before its tail, and leaves it before",
            "for block_id in reversed(block_ids):\n                if (block_hash",
            "for block_id in block_ids:\n                if (block_hash",
        ),
        (
            "a load writes to the copy of a state that a request is about to start from",
            "self._reserve(block_hash, self._starting)",
            "self._reserve(block_hash)",
        ),
        (
            "the blocks of a hit may be given out to its own load",
            "        self.pool.touch(there, reused=False)\n        new = iter(self.pool.allocate(num_new))",
            "        new = iter(self.pool.allocate(num_new))\n        self.pool.touch(there, reused=False)",
        ),
    ),
    *mutants_of(
        SCHEDULER,
        OF_CORE,
        (
            "requests that wait for a load are not bounded",
            "        self.queue.set_aside(request)\n",
            "",
        ),
        (
            "nothing runs while what was loaded takes all blocks",
            "        return tiers.cancel_loads()\n\n    def _begin_load",
            "        return True\n\n    def _begin_load",
        ),
    ),
    *mutants_of(
        MANAGER,
        (*OF_CORE, *OF_TRANSFER),
        (
            "a running request is preempted before loads give way",
            "            if self.tiers is None or not self.tiers.cancel_loads():\n                return False\n",
            "            return False\n",
        ),
        (
            "a running request gets the blocks of one prompt that is kept, and no more",
            "        while not self.reserve(request, row):\n"
            "            if self.tiers is None or not self.tiers.cancel_loads():\n                return False\n"
            "        return True\n",
            "        if self.reserve(request, row):\n            return True\n"
            "        return self.tiers is not None and self.tiers.cancel_loads() and self.reserve(request, row)\n",
        ),
    ),
    *mutants_of(
        MANAGER,
        OF_TRANSFER,
        (
            "kept KV that no server fetches holds up a waiting request as long as another runs",
            "            if not self.evict_kept(FETCH_S):\n                return False\n",
            "            return False\n",
        ),
        (
            "KV that was kept just now gives way to a waiting request",
            "self.evict_kept(FETCH_S)",
            "self.evict_kept()",
        ),
    ),
    *mutants_of(
        SCHEDULER,
        OF_TRANSFER,
        (
            "a running request is preempted for another tenant before what is kept goes",
            "if victim is not None and lacks and self.kv.evict_kept():",
            "if victim is not None and lacks and self.kv.evict_kept(1e9):",
        ),
    ),
    *mutants_of(
        MOVER,
        OF_MOVER,
        (
            "the steps before a load count as its time",
            "        self._device.wait_for(job.after)\n        job.began = job.began or time.monotonic()\n",
            "        job.began = job.began or time.monotonic()\n        self._device.wait_for(job.after)\n",
        ),
        (
            "a load that was given up while its disk hung writes in the end",
            "                if job.is_left:\n                    return True\n",
            "",
        ),
        (
            "a load waits for ever for a disk that hangs",
            "if job.move.is_load and not job.is_left and not job.is_writing:",
            "if False:",
        ),
        (
            "what came before a load was given up is used",
            "        job.is_left = True\n        job.arrived, job.missing = [], set()\n",
            "        job.is_left = True\n",
        ),
        (
            "a server that still computes a prompt is given up",
            "if (store := self._stores[name]).bounds_reads:",
            "if (store := self._stores[name]) is None:",
        ),
        (
            "loads behind one that hangs wait for ever",
            "if len(late) == store.num_threads:",
            "if False:",
        ),
        (
            "who cancels a load waits for a disk that hangs",
            "self._changed.wait_for(lambda: not stopping() or self._closing, CANCEL_WAIT_S)",
            "self._changed.wait_for(lambda: not stopping() or self._closing)",
        ),
        (
            "a load waits for a store that waits for its turn",
            "return not job.move.is_load and bool(queue) and queue[0].move.is_load",
            "return False",
        ),
        (
            "a disk that hangs holds up the end of the server",
            "thread.join(max(0.0, until - time.monotonic()))",
            "thread.join()",
        ),
        (
            "pinned memory takes twice what its records do",
            "    if not pinned:\n        return [host_memory(size",
            "    if size:\n        return [host_memory(size",
        ),
        (
            "records of two chunks have the same bytes",
            "bisect.bisect_right(self._ends[group], slot)",
            "min(1, bisect.bisect_right(self._ends[group], slot))",
        ),
        (
            "loads are bounded as stores are",
            "(self._of_all,) if job.move.is_load else (self._of_all, self._of_stores)",
            "(self._of_all, self._of_stores)",
        ),
    ),
    *mutants_of(
        DISK,
        OF_DISK,
        (
            "folders of other models grow without a bound",
            "            if left <= max_bytes:\n",
            "            if left:\n",
        ),
        (
            "engines that start together do not wait for each other",
            "with _alone(path) as is_alone:",
            "with contextlib.nullcontext(True) as is_alone:",
        ),
        (
            "the first of several engines removes the records of the others",
            "for number in range(num_engines)}",
            "for number in range(1)}",
        ),
        (
            "a file of another block is used",
            "if bytes(header) != self._header(record):",
            "if not header:",
        ),
        (
            "a damaged file is used",
            "if _digest(header, into) != digest:",
            "if not digest:",
        ),
        (
            "two engines share a folder",
            "            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n        except",
            "            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)\n        except",
        ),
        (
            "a record's file stays when another takes its slot",
            "if record.replaces is not None:",
            "if record.replaces == record.block_hash:",
        ),
    ),
    *mutants_of(
        "dflash_backend/engine_client/replicas.py",
        ("tests/triton/test_replicas.py::test_the_router_knows_as_many_blocks_as_an_engines_device_and_tiers_hold",),
        (
            "the router forgets the blocks of tiers",
            "one.ready.num_kv_blocks + one.ready.num_tier_blocks",
            "one.ready.num_kv_blocks",
        ),
    ),
    *mutants_of(
        "dflash_backend/engine_client/replicas.py",
        ("tests/triton/test_replicas.py::test_a_block_is_an_engines_as_long_as_the_device_or_a_tier_has_it",),
        (
            "a block that a tier has is no engine's",
            "if before == (0 if is_stored else 1):",
            "if before >= (0 if is_stored else 1):",
        ),
    ),
    *mutants_of(
        ENGINE,
        OF_WORKER,
        (
            "copies of states are those of requests",
            "groups.append((model.pool.tensors, len(model.state.tokens)))",
            "groups.append((model.pool.tensors, 0))",
        ),
    ),
    Mutant(
        "a server listens by IPv4 alone",
        "dflash_backend/listening.py",
        "family=family, ",
        "",
        OF_SERVER,
    ),
    Mutant(
        "the path of a converted file counts",
        "dflash_backend/checkpoints/digest.py",
        'if name != "gguf"}',
        "}",
        OF_FINGERPRINT,
    ),
    *mutants_of(
        ENGINE,
        OF_FINGERPRINT,
        ("KV of another version of the code is used", "hashlib.sha256(code_digest())", "hashlib.sha256()"),
        (
            "dynamic rotary frequencies of another length are the same",
            '_rope_lengths(pair),\n        "windows',
            '0,\n        "windows',
        ),
    ),
    *mutants_of(
        "dflash_backend/worker/kv_cache.py",
        OF_WORKER,
        (
            "the scales of FP8 KV stay behind",
            "records[own].extend((codes, scales))",
            "records[own].append(codes)",
        ),
    ),
)
