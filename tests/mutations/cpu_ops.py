"""Defects of the operations in C++, and of how they are built and called."""

from __future__ import annotations

from tests.mutations.mutant import mutants_of

KERNELS = "kernels/dflash_kernels"
TESTS = ("tests/kernels/test_cpu_ops.py",)
ATTENTION = ("tests/attention/test_cpu_backend.py",)
STACK = ("tests/models/test_layer_stack.py",)

CPU_OPS_MUTANTS = (
    *mutants_of(
        f"{KERNELS}/cpu_tiles.h",
        TESTS,
        ("the lower rows of a tile are those of the upper ones", "a + 16 * step + k", "a + k"),
        ("pairs of panels keep the sums of wide rows in one memory", "kept + (pair - first) * of_pair", "kept"),
        (
            "wide rows are summed by their last part alone",
            "for (long from = 0; from < deep",
            "for (long from = (deep - 1) / range * range; from < deep",
        ),
        ("of wide rows 32 have the sums of all", "own + pass * SUMS * PARTS :", "own :"),
        (
            "many inputs are summed by their first part alone",
            "b[i], end - begin, begin > 0,",
            "b[i], end - begin, false,",
        ),
        ("the other half of a gate has the gate's bias", "load_some(bias + i * p.n + col", "load_some(bias + col"),
        (
            "the other half of a gate is not rounded",
            "rounded<T>(sum_at(from + j * of_panel + SUMS)",
            "(sum_at(from + j * of_panel + SUMS)",
        ),
        ("sums are written over before their results are made", "turn += !in_chunks;", ""),
        ("a product of one pass forgets its first inputs' sums", "turn += !in_chunks;", "turn += kept == 1;"),
        ("the last results of some rows are not made", "results.go_on(PAIR);  // the next rows", "// the next rows"),
        (
            "a gate lets its own product through",
            "sum_at(from + j * of_panel + SUMS)",
            "sum_at(from + j * of_panel)",
        ),
        ("a number of float32 is its first term", "term == left ? Floats{} : left - term", "Floats{}"),
        ("what an infinite number has left is no number", "term == left ? Floats{} : left - term", "left - term"),
        ("the terms of several rows lie as those of one", "are_few ? p.m * LANES : 256", "are_few ? LANES : 256"),
        ("the right panel has two terms", "_tile_dpbf16ps(4, 6, 7);", ""),
        (
            "many inputs of terms are summed by their last part alone",
            "begin > 0, to + i * SUMS, ahead);",
            "false, to + i * SUMS, ahead);",
        ),
        (
            "the right half of a row of results is the left",
            "(__m512)halves[1], (__m512)halves[0]",
            "(__m512)halves[0], (__m512)halves[0]",
        ),
    ),
    *mutants_of(
        f"{KERNELS}/cpu_products.h",
        TESTS,
        ("sums of a float grid are those of its last inputs", "load(sum + i) + load(to + i)", "load(to + i)"),
        (
            "a float grid forgets the inputs made before",
            "bool adds = begin % DEPTH_AT_ONCE != 0",
            "bool adds = begin < 0",
        ),
        (
            "later rows are as the first ones",
            "a = (const float*)p.x + at * p.x_step + begin;",
            "a = (const float*)p.x + begin;",
        ),
        (
            "numbers that are made are those of the first inputs",
            "make_floats(w, first, vectors, begin, end, made);",
            "make_floats(w, first, vectors, 0, count, made);",
        ),
        (
            "numbers of a grid with few rows are rounded",
            "parts[r][j] += all(x[r * p.x_step + begin + word * CODES + i]) * number;",
            "parts[r][j] += all(x[r * p.x_step + begin + word * CODES + i]) * rounded<bf16>(number);",
        ),
        (
            "a product's last vectors are its first ones",
            "offset = sizeof(B) == 4 ? first * apart",
            "offset = sizeof(B) == 4 ? 0",
        ),
    ),
    *mutants_of(
        f"{KERNELS}/cpu_ops.cpp",
        TESTS,
        (
            "rows that all threads take together are the first ones",
            "each(threads, rows * block / blocks,",
            "each(threads, 0,",
        ),
        ("blocks of rows take the first rows' residual", "at_row(dtype, residual, first, weight->n)", "residual"),
        ("blocks of rows are rotated as the first", "at_row(dtype, cos, first, dim)", "cos"),
        (
            "the context KV of all layers is the first one's",
            "at_row(dtype, projected, i, width), own,",
            "projected, own,",
        ),
        (
            "the context KV of all layers has the first one's norm",
            "at_row(norm_dtype, norm, i, kv_heads * dim)",
            "norm",
        ),
        ("the last block of rows is left out", "begin < end) each", "begin < end && end < rows) each"),
    ),
    *mutants_of(
        f"{KERNELS}/cpu_grids.h",
        TESTS,
        ("steps that are no numbers are kept", "if (!kept) all.store(false);", ""),
        ("a least that float16 does not have is kept", "half_to_float(half) == x", "true"),
        ("outputs take the steps of those before them", "(half * LANES + i * 8) * G", "(i * 8) * G"),
        (
            "leasts of float32 are its steps",
            "widened<G.number_bytes>(steps + NUMBERS)",
            "widened<G.number_bytes>(steps)",
        ),
        ("leasts of bfloat16 are its steps", "twice<G.number_bytes>(at + NUMBERS)", "twice<G.number_bytes>(at)"),
        (
            "the later inputs take the steps of the first",
            "group < WORDS / RUN; group++, steps += GROUP",
            "group < WORDS / RUN; group++",
        ),
        ("scales of the later parts lack their upper bits", "| s[part - 4] >> 6 << 4", ""),
        ("codes of 5 bits lack the fifth", "if (type == Q5_K) c.code[i] |=", "if (false) c.code[i] |="),
        ("codes of 6 bits have no sign", "<< 4) - 32;", "<< 4);"),
        (
            "rows of a second weight begin at the first's",
            "raw + (row - first) * row_bytes",
            "raw + row % rows * row_bytes",
        ),
    ),
    *mutants_of(
        f"{KERNELS}/cpu_choice.h",
        TESTS,
        ("the lowest id is not chosen among equals", "where[i] < place", "where[i] > place"),
    ),
    *mutants_of(
        f"{KERNELS}/cpu_attention.h",
        ATTENTION,
        (
            "a query sees the key after its own",
            "std::min(count, position + 1 - base)",
            "std::min(count, position + 2 - base)",
        ),
        (
            "in tiles a query sees the key after its own",
            "Ints own = position + 1 - int(base);",
            "Ints own = position + 2 - int(base);",
        ),
        (
            "of few a query sees the key after its own",
            "four.position + 1 - int(base);",
            "four.position + 2 - int(base);",
        ),
        (
            "keys a query's window away are seen",
            "position - p.window + 1 - base);\n        if",
            "position - p.window - base);\n        if",
        ),
        (
            "in tiles keys a query's window away are seen",
            "hidden = position - int(p.window) + 1",
            "hidden = position - int(p.window)",
        ),
        (
            "of few keys a query's window away are seen",
            "hidden = four.position - int(p.window) + 1",
            "hidden = four.position - int(p.window)",
        ),
        (
            "a row's blocks are its neighbour's",
            "total[q * LANES] = 1.0f;\n    }\n  }\n  const int32_t* table = p.tables + row * p.table_step;",
            "total[q * LANES] = 1.0f;\n    }\n  }\n  const int32_t* table = p.tables;",
        ),
        (
            "in tiles a row's blocks are its neighbour's",
            "if (has_tiles) set_tiles(16, 16);\n  const int32_t* table = p.tables + row * p.table_step;",
            "if (has_tiles) set_tiles(16, 16);\n  const int32_t* table = p.tables;",
        ),
        (
            "of few a row's blocks are its neighbour's",
            "set_few_tiles(rows);\n  const int32_t* table = p.tables + row * p.table_step;",
            "set_few_tiles(rows);\n  const int32_t* table = p.tables;",
        ),
        (
            "tiles read positions past the last",
            "if (in_place && rows == 16 && unseen < 16) {",
            "if (in_place && rows > 0) {",
        ),
        (
            "of few all queries are weighed as the first four",
            "p, scores + q * (has_tiles",
            "p, scores + 0 * (has_tiles",
        ),
        (
            "in tiles outputs are not scaled as larger scores come",
            "load(out + c * LANES) * softmax.keep",
            "load(out + c * LANES)",
        ),
    ),
    *mutants_of(
        "dflash_backend/models/linear.py",
        ("tests/checkpoints/test_gguf_blocks.py",),
        (
            "weights in blocks become numbers",
            "if kept is None else None\n        weight",
            "if total < 0 else None\n        weight",
        ),
    ),
    *mutants_of(
        f"{KERNELS}/cpu_library.py",
        TESTS,
        (
            "a library is kept that has failed its trial",
            "if _compiled(compiler, made) else None",
            "if _compiled(compiler, made) or made.exists() else None",
        ),
        ("a library of another source is taken", "for path in (SOURCE, *sorted(", "for path in (*(), *sorted("),
        ("a library of other headers is taken", '(SOURCE, *sorted(SOURCE.parent.glob("cpu_*.h")))', "(SOURCE,)"),
    ),
    *mutants_of(
        f"{KERNELS}/cpu_ops.py",
        TESTS,
        (
            "rows that lie apart are read as neighbours",
            "x.data_ptr(), x.stride(0), self.address",
            "x.data_ptr(), k, self.address",
        ),
        (
            "rows that end within 32 inputs are read past their ends",
            "weight.dtype == torch.float32 and k % 32 == 0 and",
            "weight.dtype == torch.float32 and",
        ),
    ),
    *mutants_of(
        f"{KERNELS}/cpu_ops.cpp",
        TESTS,
        (
            "the first of some numbers tell whether all are bfloat16",
            "j < std::min(last, i + 1024); j++",
            "j < i + 1; j++",
        ),
        ("numbers that are nearly bfloat16 are taken for it", "if (found & 0xffff) all", "if (found & 0xff00) all"),
    ),
    *mutants_of(
        f"{KERNELS}/cpu_products.h",
        TESTS,
        (
            "the second of two numbers of bfloat16 is the first",
            "(Floats)(pair[j] & 0xffff0000u)",
            "(Floats)(pair[j] << 16)",
        ),
        (
            "float32 as bfloat16 loses its signs",
            "return uint16_t(bits >> 16); }",
            "return uint16_t(bits << 1 >> 17); }",
        ),
    ),
    *mutants_of(
        f"{KERNELS}/cpu_ops.cpp",
        STACK,
        ("all layers read the rows of the first pattern", "const Rows& r = rows[w.rows];", "const Rows& r = rows[0];"),
        ("a window is all positions", "w.causal, w.window, w.sinks, float", "w.causal, 0, w.sinks, float"),
    ),
    *mutants_of(
        f"{KERNELS}/cpu_head.h",
        ("tests/kernels/test_cpu_head.py",),
        (
            "bounds of logits leave out what codes miss",
            "_mm256_set1_ps(rows.norms[row])",
            "_mm256_setzero_ps()",
        ),
        ("logits that round to one number are not compared", "std::fabs(lowest[row]) * rows.rounding * 4", "0.0f"),
        ("what fills up a panel may be the largest", "first + 8 > head.n", "false"),
        ("the last of equal logits is chosen", "each.best > best[each.row]", "each.best >= best[each.row]"),
        (
            "logits close to one another are computed one by one",
            "* FEW_OF > units * std::max",
            "> units * FEW_OF * std::max",
        ),
        ("rows that are not finite have bounds", "if (!(norm < 1e30)) return false;", ""),
        ("the noise of a row is the first one's", "choice.seeds += each.row", "choice.seeds += 0"),
        ("a panel's noise is that of the first ids", "ids[i] = panel * LANES + i", "ids[i] = i"),
        ("a row's candidates are those of the first", "p.x + each.row * p.x_step", "p.x"),
        (
            "codes choose for top-p alone",
            "if (rows.filters[row] && !sampling.by_rank(row, head.n) && !(sampling.min_p[row] > 0.0f)) return -2;",
            "",
        ),
        (
            "codes look for the largest logits where filters keep more",
            "return std::max(from, *last);",
            "return least_top;",
        ),
        ("codes look for a rank of one too few", "+ sampling.top_k[row] - 1;", "+ sampling.top_k[row] - 2;"),
        ("codes choose where a rounded sum decides", "return chosen >= is;", "return true;"),
        ("top-p has the weights of what top-k hides", "each.logit >= is ? std::exp(", "true ? std::exp("),
        ("codes choose of all candidates' logits", "count(*each), &may_be, *each", "count(*each), nullptr, *each"),
        # Where the processor has tiles.
        ("tiles multiply the upper bytes alone", "int8_t(number - upper * 256)", "int8_t(0)"),
        (
            "bounds of rows after the 16th are those of the first",
            "row_bounds(head, rows, row + r, panel, halves",
            "row_bounds(head, rows, r, panel, halves",
        ),
    ),
    *mutants_of(
        f"{KERNELS}/cpu_choice.h",
        ("tests/kernels/test_sampling.py", "tests/kernels/test_logits_filter.py"),
        (
            "a logit more than top-k says is kept",
            "last_within(some, double(top_k)))",
            "last_within(some, double(top_k) + 1))",
        ),
        (
            "min-p does not count the temperature",
            "return top + temperature * std::log(min_p);",
            "return top + std::log(min_p);",
        ),
        ("top-p sums what min-p hides", "weight += select(x >= lowest, vexp(", "weight += select(x == x, vexp("),
        ("top-p sums what top-k hides", "some.erase(std::remove_if(", "if (0) some.erase(std::remove_if("),
        ("weights are those at temperature 1", "by = 1.0f / temperature;", "by = 1.0f;"),
        ("a group whose largest is kept is passed over", "tops[g] >= from && c", "tops[g] > from && c"),
        ("what fills up a row may be kept", "select(lanes() < int(vocab - c), x, all(-INFINITY))", "x"),
        ("a token on the edge of top-p is kept", "if (more < target) first", "if (more <= target) first"),
    ),
    *mutants_of(
        f"{KERNELS}/cpu_choice.h",
        ("tests/kernels/test_logprobs.py",),
        (
            "a group that has one of the likeliest tokens is passed over",
            "from <= tops[g] && c",
            "from < tops[g] && c",
        ),
        ("the last of equals is the most likely one", "- uint64_t(c + i)))", "+ uint64_t(c + i)))"),
        ("what fills up a row has a rank", "likely & (lanes() < inside(c))", "likely"),
    ),
    *mutants_of(
        f"{KERNELS}/cpu_choice.h",
        ("tests/kernels/test_penalties.py",),
        ("C++: drafts count for the next step", "for (int64_t i = 0; i < num_draft; i++) draft(i)--;", ""),
        ("C++: tokens of the prompt count as output", "if (at < prompt_len) counts", "if (false) counts"),
        ("C++: logits do not count the drafts before them", "if (i > 0) draft(i - 1)++;", "if (i > 0) draft(0)++;"),
        ("C++: tokens are counted once more in each step", "p.num_counted[index] = int32_t(", "(void)("),
        (
            "C++: a penalty is fused with what follows",
            "x -= rounded_by_itself(frequency * times);",
            "x -= frequency * times;",
        ),
        ("C++: penalties are those of the first request", "p.penalties + index * 3", "p.penalties"),
    ),
    *mutants_of(
        f"{KERNELS}/cpu_head.py",
        ("tests/kernels/test_cpu_head.py",),
        ("rows that bounds say little of are tried at each step", "min(MAX_PAUSE, 2 * self._pause + 1)", "0"),
        ("rows that bounds say little of are never tried again", "max(0, self._left_out - 1)", "self._left_out"),
        ("codes of the later outputs lie at the first", "codes[first // LANES : first // LANES +", "codes[0 :"),
    ),
    *mutants_of(
        "dflash_backend/worker/step.py",
        ("tests/worker/test_coarse_head.py",),
        ("steps that look at logits have none", "if not step.needs_logits and self", "if self"),
    ),
    *mutants_of(
        "dflash_backend/worker/runner.py",
        ("tests/worker/test_coarse_head.py",),
        ("special rows have no logits", "step.needs_logits = special is not None", "step.needs_logits = False"),
    ),
    *mutants_of(
        "dflash_backend/worker/step_ops.py",
        ("tests/worker/test_coarse_head.py",),
        (
            "sampled tokens are the likeliest",
            "target.likeliest(hidden, temperature, seeds, positions, *filters)",
            "target.likeliest(hidden)",
        ),
        (
            "min_p is top_p where codes choose",
            "state.top_k, state.top_p, state.min_p)\n        )\n        return target",
            "state.top_k, state.min_p, state.top_p)\n        )\n        return target",
        ),
    ),
    *mutants_of(
        "dflash_backend/models/decoder.py",
        ("tests/worker/test_coarse_head.py",),
        ("a head under a soft cap has codes", "if self.softcap is None:", "if True:"),
    ),
    *mutants_of(
        "dflash_backend/models/layer_stack.py",
        STACK,
        ("a pass writes to the caches of the one before", "not all(map(operator.is_, caches, bound[0]))", "False"),
        (
            "layers with a window write to the others' slots",
            "_rows(context.slots_of(pattern), metadata)",
            "_rows(context.slots, metadata)",
        ),
    ),
    *mutants_of(
        f"{KERNELS}/cpu_attention.h",
        ATTENTION,
        (
            "what came before a larger maximum keeps its weight",
            "if (any(changed)) for (long c = 0; c < dim; c++) store(out",
            "if (0) for (long c = 0; c < dim; c++) store(out",
        ),
        (
            "by terms what came before a larger maximum keeps its weight",
            "if (any(changed)) for (long c = 0; c < dim; c++) store(lot",
            "if (0) for (long c = 0; c < dim; c++) store(lot",
        ),
        ("float32 is the sum of two terms", "of(2, 0, 5) of(1, 1, 6) of(0, 2, 7) of(1, 0, 5)", "of(1, 0, 5)"),
        (
            "by terms a block that a window has given back is read",
            "unseen = std::min(std::max<long>(0, begin - base), count);",
            "unseen = 0;",
        ),
        (
            "by terms the first queries of a chunk are left out",
            "std::max<long>(0, (base - start) * group / LANES)",
            "std::max<long>(0, (base - start) * group / LANES + 1)",
        ),
        (
            "verified drafts in float32 have other bits than decoded tokens",
            "constexpr int ALIKE = 512;",
            "constexpr int ALIKE = 8;",
        ),
        (
            "a block that a window has given back is read",
            "long unseen = std::max<long>(0, begin - base);",
            "long unseen = 0;",
        ),
        (
            "in tiles a block that a window has given back is read",
            "unseen = std::min(std::max<long>(0, begin - base - t), rows);",
            "unseen = 0;",
        ),
        (
            "a chunk past the first query's window is seen whole",
            "(p.causal || base + POSITIONS <= start + p.window)",
            "true",
        ),
        (
            "a chunk that the last query's window does not reach is seen whole",
            "return !p.window || (base > last - p.window &&",
            "return !p.window || (base > start - p.window &&",
        ),
        ("of few what came before a larger maximum keeps its weight", "if (any(changed))\n", "if (0)\n"),
        (
            "in float32 what came before a larger maximum keeps its weight",
            "store(output + c, load(output + c) * keep);\n  }\n  float shift",
            "store(output + c, load(output + c));\n  }\n  float shift",
        ),
        (
            "a maximum's weight is off by the rounding of its score",
            "vexp2(rounded_by_itself(x[j] * scale) - shift)",
            "vexp2(x[j] * scale - shift)",
        ),
        ("in float32 a total keeps what came before a larger maximum", "sums *= keep;", ""),
        (
            "values where they lie are read from the block's first position",
            "(const float*)keys[t] + p.kv_heads * dim",
            "(const float*)keys[t / 16 * 16] + p.kv_heads * dim",
        ),
        (
            "the sums of 64 positions take the place of those before",
            "store(to, load(to) + load(sums",
            "store(to, load(sums",
        ),
        (
            "of two queries the second one has the first one's scores",
            "few_score_rows<2>(turned, query + q * dim",
            "few_score_rows<2>(turned, query",
        ),
        (
            "of few keys that are turned over lie one tile on",
            "turned + c * POSITIONS + t, POSITIONS);",
            "turned + c * POSITIONS + 16, POSITIONS);",
        ),
        ("a maximum stays behind its scores for ever", "constexpr float LAG = 8.0f;", "constexpr float LAG = 1e9f;"),
    ),
)
