#pragma once

namespace amp_mp::casting {

// Has `cleared` called once, when torch next clears its own cache of casts: at the end of the
// outermost autocast region of any thread, or in torch.clear_autocast_cache(). Also called, and at
// once, if torch's cache takes nothing now. torch holds a lock meanwhile: `cleared` must not cast.
void on_torch_clearing(void (*cleared)());

// How many autocast regions this thread is in.
int open_regions();

}  // namespace amp_mp::casting
