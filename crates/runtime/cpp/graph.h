// A CUDA graph: work that was captured from a stream once and is launched again as one.
//
// All functions but `rt_graph_new` and `rt_graph_free` are called with the graph's device current and, but for the replay,
// with the stream current that is captured, which is not the device's default one. libtorch_cuda is open.
#pragma once
#include "guard.h"

#include <memory>

struct rt_graph;

extern "C" {
// `out` receives a graph that the caller frees with `rt_graph_free`.
rt_status rt_graph_new(rt_graph** out);
// `graph` is taken; null is allowed. Its capture, if it began one, has been ended.
void rt_graph_free(rt_graph* graph);
// Captures what this stream is given from here on, instead of running it.
rt_status rt_graph_begin(rt_graph* graph);
// Ends the capture and makes the graph ready to run.
rt_status rt_graph_end(rt_graph* graph);
// Begins a capture of nothing on the stream, past libtorch, which goes on with the one that it knows of: for `rt_graph_end` to
// end, where CUDA has ended the other by refusing it.
rt_status rt_graph_restart(rt_graph* graph);
// Launches the work on the current stream, and moves the default generator on.
rt_status rt_graph_replay(rt_graph* graph);
}
