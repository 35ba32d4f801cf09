// A recording of the operators that reach the backends: a graph's stand-in on a CPU.
//
// A recording owns the memory of all tensors that its operators read or wrote, as a graph's pool does.
#pragma once
#include "guard.h"

struct rt_recording;

extern "C" {
// `out` receives an empty recording that the caller frees with `rt_recording_free`.
rt_status rt_recording_new(rt_recording** out);
// `recording` is taken; null is allowed. It has ended.
void rt_recording_free(rt_recording* recording);
// From here to `rt_recording_end`, operators that this thread calls are recorded as well as computed, also those that backward calls
// on this thread. One recording at a time on a thread.
rt_status rt_recording_begin(rt_recording* recording);
void rt_recording_end();
// The number of operators.
uint64_t rt_recording_size(const rt_recording* recording);
// An error that names the first operator and argument which differ between two runs of one step. Both are borrowed.
rt_status rt_recording_compare(const rt_recording* first, const rt_recording* second);
// Runs the operators again, with the recorded scalars, from and into the recorded memory.
rt_status rt_recording_replay(rt_recording* recording);
}
