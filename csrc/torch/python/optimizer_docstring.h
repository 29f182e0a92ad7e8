#pragma once
// What help() of every fused optimizer ends with.

namespace amp_mp {

inline constexpr const char* kSharedArguments = R"(
    All fused optimizers also take (docs/format_reference.md has the formats in full):
        params: parameters or param_groups.
        maximize: True ascends. Default False.
        max_grad_norm: clip by the gradients' global 2-norm, as torch's clip_grad_norm_. Default None.
        check_overflow: True skips a step with an inf or NaN gradient; so do clipping, loss scalers,
            LAMB, LARS and NovoGrad, which measure the gradients anyway. A skipped step leaves every
            byte as it was. 25 in a row give one warning, which names the parameters. Default False.
        skip_norm_above: skips a step whose gradients' norm, before clipping, is above this number, or
            far above those before: amp_mp.scaling.NormSpike(sigmas=6, window=100). On all processes
            alike; no loss scale counts it as an overflow. Default None.
        raise_after_skips: after as many skipped steps in a row, for a norm or an overflow, raise
            RuntimeError; on CUDA when the report has arrived. Default None.
        amp_scaling: True lets the step unscale and skip for torch.amp.GradScaler, which then takes
            float16 gradients. False is for frameworks that need unscaled gradients. Default True.
        process_groups: torch.distributed process groups, or a device mesh, whose processes hold
            other parameters of the model (pipeline stages, ZeroRedundancyOptimizer): the norm and
            the decision to skip are of all. Groups of DTensors are known already. Default None.
        memory: bytes per low-precision parameter with two states, besides its gradient: "exact"
            (12, loses nothing), "lean" (7), "tiny" (6.1), "micro" (5.1, for beta2 <= .99) or
            "float32" (14). Default "exact". float32 parameters have no master.
        master: how masters alone are stored: "split32", "split24" (the parameter and a remainder of
            2 or 1 bytes are the master), "float32", or "none": the parameter itself is updated.
            What a script writes into a parameter counts with any of them. Default: as memory.
        exp_avg="bfloat16" and the like: how the state of that name alone is stored. Averages of
            gradients: "float32", "bfloat16", "float16", "m8"; squares: "float32", "bfloat16",
            "float16", "float16_root", "ue8m8", "log8". Default: as memory. Some are float32 always.
        rounding: "nearest" or "stochastic", of parameters without a master. Default "nearest".
        seed: of stochastic rounding, in [0, 2^64); the same on all replicas. Default 0.
        offload: "state" keeps masters and states in pinned memory of the host, where a GPU's kernels
            step them (docs/memory.md); nothing else changes, and on a CPU nothing. Default None.
        foreach, fused, capturable: torch's arguments, accepted without effect.
    Every state also has step, and low-precision parameters master, remainder16 or remainder8.
    Raises TypeError for an unknown argument and ValueError for one out of range, by name.
    )";

}  // namespace amp_mp
