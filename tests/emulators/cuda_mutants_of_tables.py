"""Mistakes in the tables of a step's slots and in what decide does, for test_cuda_mutants.py."""

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
        "decide.cu", "plan.grad_of(t)}", "nullptr}", "decide.cu", "asan", NOWHERE),
    "the gradient of the next slot": Mutant(
        "step_arguments.h", "(word[rates + t])", "(word[rates + (t + 1) % count])", "decide.cu",
        "asan", NOWHERE),
    "a short plan's entries are not written": Mutant(
        "step_arguments.h", "if (t < count) entries", "if (t < 1) entries", "decide.cu", "plain",
        ASSUMED),
    "only the first slots of a thread get a rule": Mutant(
        "decide.cu", "if (first >= kStep) known.read(plan, first);", "", "decide.cu", "asan",
        NOWHERE),
    "clocks do not tick": Mutant(
        "decide.cu", "*input.clock = clock;", "", "decide.cu", "plain", "FAILED apply"),
    "no block of apply writes the report": Mutant(
        "apply.cu", "list.first_block = has_report;", "", "apply.cu", "plain",
        "FAILED one decision"),
    "a step of empty tensors reports nothing": Mutant(
        "apply.cu", "false, !has_report, stream", "false, false, stream", "apply.cu", "plain",
        "FAILED one decision"),
    "the scale in the report is the step's before": Mutant(
        "decide.cu", "inputs.report_buffer.counts->next_scale = next_scale;", "", "decide.cu",
        "plain", "FAILED next scale"),
    "the decision does not wait for the policy": Mutant(
        "deciding.h", "__syncthreads();  // the policy is in shared memory", "", "decide.cu",
        "plain", "FAILED a decided scale"),
    "a policy's state stays in shared memory": Mutant(
        "deciding.h", "update_.policy_out[threadIdx.x] = shared_.policy[threadIdx.x];", ";",
        "decide.cu", "plain", "FAILED a replayed scale"),
    "nobody waits for the verdict": Mutant(
        "deciding.h", "__syncthreads();  // the verdict is there, and the policy's new state", "",
        "*.cu", "tsan", "ThreadSanitizer: data race"),
}
# fmt: on
