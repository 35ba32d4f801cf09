// CUDA graphs: work that is captured from a stream once, and then launched as a whole.
//
// Preconditions: libtorch_cuda is loaded. Except in `rt_graph_new` and `rt_graph_free`, the graph's device is current. In begin, end
// and restart, the current stream is the captured one, which is not the device's default stream.
#pragma once
#include "guard.h"

#include <memory>

struct rt_graph;

extern "C" {
// `out` receives a graph that the caller frees with `rt_graph_free`.
rt_status rt_graph_new(rt_graph** out);
// `graph` is taken; null is allowed. A capture that it began has ended.
void rt_graph_free(rt_graph* graph);
// Starts to capture the stream: work that it gets is recorded instead of run. Memory comes from `pool`, two numbers from
// `rt_graph_pool`, or from a new pool if they are 0.
rt_status rt_graph_begin(rt_graph* graph, const uint64_t* pool);
// Writes the two numbers of a captured graph's pool.
rt_status rt_graph_pool(rt_graph* graph, uint64_t* pool);
// Ends the capture and makes the graph ready to run.
rt_status rt_graph_end(rt_graph* graph);
// Begins an empty capture on the stream without telling libtorch. After CUDA has ended a capture as invalid, libtorch still counts
// it as running; `rt_graph_end` then needs a capture that it can end.
rt_status rt_graph_restart(rt_graph* graph);
// Launches the work on the current stream, and advances the default random generator.
rt_status rt_graph_replay(rt_graph* graph);
}
