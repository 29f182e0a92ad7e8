#pragma once

namespace amp_mp::casting {

// From now on, where autocast is on when an optimizer's step begins, it is on again when the step
// ends, and casts from before the step are dropped; also by an exception, at which torch runs no
// post-hook. torch wraps every step in a RecordFunction and reports its end in both cases. Calls
// after the first do nothing.
void guard_steps();

}  // namespace amp_mp::casting
