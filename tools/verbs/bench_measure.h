// What benchmarks measure, and how it is written down.
#pragma once

#include <emend/devices/placement.h>
#include <emend/models/model.h>

#include <functional>
#include <nlohmann/json.hpp>

namespace emend::tools {

/// Seconds, arithmetic and peak memory of one way to do a phase.
struct Measure {
  double seconds = 0;
  double gflop = 0;
  nlohmann::ordered_json peak_bytes;  ///< a device; "host" is the process
};

/// Runs `work`; peaks of the host and of the model's devices start anew.
[[nodiscard]] Measure measured(const models::Model& model, const std::function<void()>& work);

/// Processor, cores, threads, load and the best of several products of square matrices, a dtype each.
[[nodiscard]] nlohmann::ordered_json describe_machine(const models::Model& model);

/// Seconds of both ways and their ratio, facts a second, arithmetic and its share of `peak` (10⁹ operations a second).
/// Without a reference (0 seconds) the ratio is left out.
[[nodiscard]] nlohmann::ordered_json phase_document(const Measure& reference, const Measure& fast, double peak,
                                                    int64_t facts = 0);

}  // namespace emend::tools
