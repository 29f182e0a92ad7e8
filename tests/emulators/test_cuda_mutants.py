"""The tests of the CUDA kernels notice mistakes: each mutant has one, and has to fail.

Another line of MUTANTS is all that another mutant takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from test_cuda_kernels import CSRC, SOURCES, run, why_unavailable

from cuda_mutants_of_tables import BEYOND, MUTANTS_OF_TABLES, NOWHERE  # isort: skip
from cuda_on_cpu.mutate import Mutant, Original, build_mutant, build_original, with_rules  # isort: skip

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("cuda_mutants")]

RULES = ("AdamW", "LAMB", "Muon")  # those with kernels of their own, and every kind of list
RACE = "ThreadSanitizer: data race"
MISALIGNED = "misaligned address"
TICKET = """, which the barrier has shown to this thread
    shared.is_last = atomicAdd(ticket, 1u) == gridDim.x - 1;
    """
# What is wrong: the file, a text in it and what that becomes; the kernels that show it, in which
# variant of the build, and what the program then says.
# fmt: off
MUTANTS = {
    "no barrier before a group's scale is written": Mutant(
        "convert.h", "__syncwarp(kWarp);", "", "*.cu", "tsan", RACE),
    "the largest of half a group": Mutant(
        "convert.h", "d = kThreadsOfGroup / 2", "d = kThreadsOfGroup / 4", "apply.cu", "plain",
        "FAILED apply"),
    "a group's scale is not stored": Mutant(
        "convert.h", "scales[uint64_t(at) / kGroup] = raw;", ";", "apply.cu",
        "plain", "FAILED apply"),
    "the scale of the group before": Mutant(
        "convert.h", "raw_of(scales[uint64_t(at)", "raw_of(scales[uint64_t(at & -64)",
        "apply.cu", "plain", "FAILED apply"),
    "a group of NaN is numbers": Mutant(
        "convert.h", "is_plain ? y : group.special(scale)", "y", "apply.cu", "plain",
        "FAILED apply"),
    "codes of a group of NaN are kept": Mutant(
        "convert.h", "if (!group.is_plain(scale)) data.word[0] = data.word[1] = 0;", "",
        "apply.cu", "plain", "FAILED apply"),
    "m8 stores numbers for NaN": Mutant(
        "../core/m8.h", "largest <= 0x7F7F0000u ? least : 0x7FC00000u", "least", "copy.cu",
        "plain", "FAILED copy to, m8"),
    "log8 stores numbers for NaN": Mutant(
        "../core/log8.h", "least <= 255 ? least : kBad", "least", "apply.cu", "plain",
        "FAILED apply"),
    "m8's scale is rounded down": Mutant(
        "../core/m8.h", "largest + 0xFFFFu", "largest", "apply.cu", "plain", "FAILED apply"),
    "log8's scale may be its largest number": Mutant(
        "../core/log8.h", "(largest >> 19) + 1", "(largest >> 19)", "apply.cu", "plain",
        "FAILED apply"),
    "log8 has no floor": Mutant(
        "../core/log8.h", "code > 0 ? code : 0", "code", "apply.cu", "plain", "FAILED apply"),
    "log8 knows no fine steps": Mutant(
        "../core/log8.h", "coarse < fine ? coarse : fine", "coarse", "apply.cu", "plain",
        "FAILED apply"),
    "both states have the first's scales": Mutant(
        "slot_table.h", "e.scales1", "e.scales0", "apply.cu", "asan", NOWHERE),
    "the second state's scales are not passed on": Mutant(
        "step_table.cu", "s.state[1].rest", "s.state[0].rest", "step_table.cu", "asan", NOWHERE),
    "any format may be any state's": Mutant(
        "slot_table.h", "return !has || is_in(formats, state.format);", "return true;",
        "apply.cu", "plain", "FAILED another kind's format is refused"),
    "a shorter last chunk is whole": Mutant(
        "tensor_table.h", "is_last ? table.last(low) : table.chunk", "table.chunk", "copy.cu",
        "asan", BEYOND),
    "no barrier before blocks are added": Mutant(
        "span_threads.h", "__syncthreads();", "", "measure.cu", "plain", "FAILED measure"),
    "no barrier before lanes are added": Mutant(
        "combine.h", "shared.lane[threadIdx.x] = sum;\n  __syncthreads();",
        "shared.lane[threadIdx.x] = sum;", "measure.cu", "plain", "FAILED sums of spans"),
    "no fences around a block's ticket": Mutant(
        "combine.h", f"__threadfence();  // the whole block's writes{TICKET}__threadfence();",
        f"// the whole block's writes{TICKET}", "*.cu", "tsan", RACE),
    "the first block adds what others have not": Mutant(
        "combine.h", "== gridDim.x - 1", "== 0u", "decide.cu", "plain", "FAILED"),
    "the last span is left out": Mutant(
        "combine.h", "for (; i < count; i +=", "for (; i + 1 < count; i +=", "measure.cu", "plain",
        "FAILED sums of spans"),
    "a report is sealed before it is written": Mutant(
        "step_report.h", "(&report.seal) = seal;", "(&report.seal) = 0;", "decide.cu", "plain",
        "FAILED a report"),
    "a captured rate is the one of the capture": Mutant(
        "decide.cu", "read_rate(input[k].hyper);", "", "decide.cu", "plain",
        "FAILED a replayed step"),
    "the clocks of a skipped step tick": Mutant(
        "decide.cu", "decided.verdict.found_inf == 0", "true", "decide.cu", "plain",
        "FAILED a skipped step"),
    "a tail is one too long": Mutant(
        "copy.cu", "kPack ? left :", "kPack ? left + 1 :", "copy.cu", "asan", BEYOND),
    "a tail is one too short": Mutant(
        "apply.cu", "kPack ? left :", "kPack ? left - 1 :", "apply.cu", "plain", "FAILED apply"),
    "a tail that is summed again is wide": Mutant(
        "measure.cu", "wide && n - i >= kPack", "wide", "measure.cu", "asan", BEYOND),
    "the tensor before a chunk's": Mutant(
        "tensor_table.h", "<= int(blockIdx.x)", "< int(blockIdx.x)", "copy.cu",
        "asan", "AddressSanitizer:"),
    "random bytes of the eight before": Mutant(
        "pack8.h", "(e / kPack + 1) * kPack", "e / kPack * kPack", "apply.cu", "plain",
        "FAILED apply"),
    "a draw's first eight bytes for all": Mutant(
        "pack8.h", "place.byte >= kPack", "false", "apply.cu", "plain", "FAILED apply"),
    "elements that share a byte are rounded alike": Mutant(
        "pack8.h", "return x ^ each ^ (x & each & 0x40404040u) << 1;", "return x;", "apply.cu",
        "plain", "FAILED apply"),
    "a multiple of 64 is added without its carry": Mutant(
        "pack8.h", " ^ (x & each & 0x40404040u) << 1", "", "apply.cu", "plain",
        "FAILED apply"),
    "only some bytes are added to": Mutant(
        "pack8.h", "added * 0x01010101u", "added * 0x00010101u", "apply.cu", "plain",
        "FAILED apply"),
    "rows that end in an eight add nothing": Mutant(
        "pack8.h", "+ place.added) & 0xFFu", ") & 0xFFu", "apply.cu", "plain", "FAILED apply"),
    "elements that share a byte lie 32 apart": Mutant(
        "../core/random.h", "kSharedBytes = 64;", "kSharedBytes = 32;", "apply.cu", "plain",
        "FAILED apply"),
    "the row before": Mutant(
        "pack8.h", "at - number * rows.length >= rows.length", "false", "apply.cu", "plain",
        "FAILED apply"),
    "rows without gaps": Mutant(
        "pack8.h", "(rows.stride - rows.length)", "rows.length", "apply.cu", "plain",
        "FAILED apply"),
    "eight elements always lie in one row": Mutant(
        "pack8.h", "rows.length % kPack == 0", "true", "moments.cu", "plain", "FAILED apply"),
    "rows are not passed on": Mutant(
        "step_table.cu", "Rows::of(s.origin)", "Rows{}", "step_table.cu", "plain", "FAILED apply"),
    "copies know no rows": Mutant(
        "copy.cu", "Rows::of(origin)", "Rows{}", "copy.cu", "plain", "FAILED copy to"),
    "a skipped step gathers what was there": Mutant(
        "moments.cu", "spans[blockIdx.x] = {};", ";", "moments.cu", "plain",
        "FAILED updates are gathered"),
    "updates are not gathered": Mutant(
        "decide.cu", "if (inputs.gathered)", "if (false)", "decide.cu", "plain", "FAILED apply"),
    "eight bytes are wide": Mutant(
        "pack8.h", "& 15) == 0", "& 7) == 0", "copy.cu", "asan", MISALIGNED),
    "one array is always wide": Mutant(
        "slot_table.h", "wide && is_wide(data)", "wide && (number > kState0 || is_wide(data))",
        "*.cu", "asan", MISALIGNED),
    "remainders are always wide": Mutant(
        "copy.cu", "is_wide(from.rest)", "true", "copy.cu", "asan", MISALIGNED),
    "weights do not saturate": Mutant(
        "access.h", "encode<true>", "encode<false>", "apply.cu", "plain", "FAILED apply"),
    "slots of known formats are not updated": Mutant(
        "apply.cu", "return apply_chunk<Rule, Layout>(entries, chunk, slot_rules);", "return;",
        "apply.cu", "plain", "FAILED apply"),
    "slots of other formats are not updated": Mutant(
        "apply.cu", "  apply_chunk<Rule, kAnyTag>(entries, chunk, slot_rules);", ";", "apply.cu",
        "plain", "FAILED apply"),
    "a layout ignores the last state": Mutant(
        "layouts.h", "a < arrays; ++a", "a < arrays - 1; ++a", "apply.cu", "plain",
        "FAILED apply"),
    "zero over zero is zero": Mutant(
        "quotient.h", "(f.square == 0 && divide.eps > 0)", "f.square == 0", "apply.cu", "plain",
        "FAILED apply"),
    "hard numbers are divided quickly": Mutant(
        "quotient.h", "if (farthest < kQuickSpan) return;", "return;", "apply.cu", "plain",
        "FAILED apply"),
    "negative squares are easy": Mutant(
        "quotient.h", "return x > y ? x : y;", "return x;", "apply.cu", "plain", "FAILED apply"),
    "an average is the newest value": Mutant(
        "average.cu", "averaging(average[k], x[k])", "x[k]", "average.cu", "plain",
        "FAILED average in"),
    "an average's tail is one too long": Mutant(
        "average.cu", "kPack ? left :", "kPack ? left + 1 :", "average.cu", "asan", BEYOND),
    "rests of averages are always wide": Mutant(
        "average.cu", "a < 4; ++a)", "a < 2; ++a)", "average.cu", "asan", MISALIGNED),
    "averages do not saturate": Mutant(
        "average.cu", "store_history<kFormatsHere>", "store<kFormatsHere>", "average.cu", "plain",
        "FAILED average in, float16"),
    "copies do not saturate": Mutant(
        "copy.cu", "clamp ? saturate(x[k] * multiplier) :", "", "copy.cu", "plain",
        "FAILED copy to"),
    "a skipped step writes": Mutant(
        "apply.cu", "if (found_inf != 0) return;", "if (found_inf > 1) return;", "apply.cu",
        "asan", NOWHERE),
    "a skipped step advances the moments": Mutant(
        "moments.cu", "found_inf != 0", "found_inf > 1", "moments.cu", "asan", NOWHERE),
    "a skipped step stores directions": Mutant(
        "directions.cu", "if (found_inf != 0) return;", "if (found_inf > 1) return;",
        "directions.cu", "asan", NOWHERE),
    "directions are of scaled gradients": Mutant(
        "directions.cu", "g[k] * multiplier", "g[k]", "directions.cu", "plain", "FAILED apply"),
    "directions draw no random bits": Mutant(
        "directions.cu", "draws ? slot.again().randomness().eight(false, at) : 0", "0",
        "directions.cu", "plain", "FAILED apply"),
    "an update is multiplied as a gradient": Mutant(
        "apply.cu", "has_direction<Rule> ? 1.0f : slot_rule.multiplier", "slot_rule.multiplier",
        "apply.cu", "plain", "FAILED apply"),
    "a skipped copy writes": Mutant(
        "copy.cu", "found_inf != 0", "found_inf > 1", "copy.cu", "plain", "FAILED a skipped copy"),
    **MUTANTS_OF_TABLES,
}
# fmt: on


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    """The program without a mistake, in the variant that compiles fastest."""
    if reason := why_unavailable("plain"):
        pytest.skip(f"no build of the CUDA kernels: {reason}")
    return build_original(SOURCES, CSRC, RULES, tmp_path_factory.mktemp("cuda_mutants"))


@pytest.fixture(scope="module")
def programs(original: Original) -> Iterator[dict[str, Future[Path]]]:
    """The program of each mutant; two are compiled while others run."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        yield {
            name: pool.submit(build_mutant, mutant, original, name)
            for name, mutant in MUTANTS.items()
            if not why_unavailable(mutant.variant)
        }
        pool.shutdown(cancel_futures=True)


def test_without_a_mistake_all_is_equal(original: Original) -> None:
    done = run(original.program, "plain", "quick")
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout


@pytest.mark.parametrize("name", MUTANTS)
def test_mistake_is_noticed(programs: dict[str, Future[Path]], name: str) -> None:
    mutant = MUTANTS[name]
    if reason := why_unavailable(mutant.variant):
        pytest.skip(reason)
    done = run(programs[name].result(), mutant.variant, "quick", mutant.says, timeout=100)
    output = done.stdout + done.stderr
    assert done.returncode != 0, f"nobody noticed: {name}\n{output[-2000:]}"
    assert mutant.says in output, output[-4000:]


def test_a_text_that_has_gone_is_an_error() -> None:
    mutant = Mutant("span_threads.h", "__syncthreads();", "", "measure.cu", "plain", "")
    assert mutant.of("a; __syncthreads(); b;") == "a;  b;"
    for source, count in (("a; b;", 0), ("__syncthreads(); __syncthreads();", 2)):
        with pytest.raises(ValueError, match=rf"'__syncthreads\(\);' {count} times, expected once"):
            mutant.of(source)


@pytest.mark.parametrize(("shown_by", "variant"), [("gone.cu", "plain"), ("copy.cu", "tsan")])
def test_kernels_that_cannot_show_a_mistake_are_refused(
    original: Original, shown_by: str, variant: str
) -> None:
    mutant = Mutant("copy.cu", "is_wide(from.rest)", "true", shown_by, variant, "")
    with pytest.raises(ValueError, match=f"shown_by: '{shown_by}' has to name kernels"):
        build_mutant(mutant, original, shown_by)


def test_rules_are_left_out_of_the_list() -> None:
    header = (
        "#define LIST(X) \\\n  X(AdamW, adamw_) \\\n  X(SGD, sgd_) \\\n  X(Lion, lion_)\n\nint n;\n"
    )
    assert with_rules(header, ["SGD"]) == "#define LIST(X) \\\n  X(SGD, sgd_) \\\n\nint n;\n"
    with pytest.raises(ValueError, match=r"\['Adamax'\] are not in core/rules.h"):
        with_rules(header, ["Adamax"])
