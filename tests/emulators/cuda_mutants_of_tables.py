"""Mistakes in the tables of a step's slots, for test_cuda_mutants.py."""

from cuda_on_cpu.mutate import Mutant

BEYOND = "heap-buffer-overflow"
ASSUMED = "an assumption that does not hold"
NOWHERE = "AddressSanitizer: SEGV"
# fmt: off
MUTANTS_OF_TABLES = {
    "a slot's shorter last chunk is whole": Mutant(
        "step_table.h", "left < table.chunk ? int(left) : table.chunk", "table.chunk", "apply.cu",
        "asan", BEYOND),
    "the slot before a chunk's": Mutant(
        "step_table.h", "start.first_chunk <= block", "start.first_chunk < block", "apply.cu",
        "asan", NOWHERE),
    "the search ends a round too early": Mutant(
        "step_table.h", "while (stride > 1)", "while (stride > 32)", "apply.cu", "plain",
        ASSUMED),
    "the search leaves out the last slots": Mutant(
        "step_table.h", "stride = (count + 31) / 32", "stride = count > 32 ? count / 32 : 1",
        "apply.cu", "plain", ASSUMED),
    "only the last difference of many is uploaded": Mutant(
        "step_table.cu", "if (begin_ == end_) begin_ = begin;", "begin_ = begin;", "step_table.cu",
        "plain", "FAILED a table follows"),
    "what differs is not remembered": Mutant(
        "step_table.cu", "std::memcpy(known, bytes, size_t(size));", "", "step_table.cu", "plain",
        "FAILED a table follows"),
    "asking about a table changes it": Mutant(
        "step_table.cu", "if (only_asks_) return;", "", "step_table.cu", "plain",
        "FAILED asking changes nothing"),
    "numbers of groups are not uploaded": Mutant(
        "step_table.cu", "writer.put(layout.hypers + g", "if (g > 0) writer.put(layout.hypers + g",
        "step_table.cu", "plain", "FAILED"),
    "rates are uploaded": Mutant(
        "step_table.cu", "if (rates_travel(table.groups)) hyper.lr = 0;", "", "step_table.cu",
        "plain", "FAILED a table is asked"),
    "the first group's rate for all": Mutant(
        "step_arguments.h", "&word[e.group]", "&word[0]", "decide.cu", "plain", "FAILED apply"),
    "gradients are not passed on": Mutant(
        "decide.cu", "input.grad}", "nullptr}", "decide.cu", "asan", NOWHERE),
    "the gradient of the next slot": Mutant(
        "step_arguments.h", "(word[rates + t])", "(word[rates + (t + 1) % count])", "decide.cu",
        "asan", NOWHERE),
    "a short plan's entries are not written": Mutant(
        "step_arguments.h", "if (t < count) entries", "if (t < 1) entries", "decide.cu", "plain",
        ASSUMED),
}
# fmt: on
