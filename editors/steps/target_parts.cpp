// Facts in parts, for the cores of a host: their targets do not interact, so no core waits for another one.
#include <emend/core/text.h>
#include <emend/devices/cores.h>
#include <emend/devices/placement.h>
#include <emend/devices/runtime.h>
#include <emend/editors/detail/active_set.h>
#include <emend/editors/detail/target_engines.h>
#include <emend/models/compute_copy.h>
#include <emend/models/side_by_side.h>

#include <algorithm>

namespace emend::editors::detail {

void TargetProgress::finished(double loss) {
  const std::lock_guard lock(mutex_);
  ++done_;
  tell(formatted("loss %.2f", loss));
}

void TargetProgress::step(const LossTerms& last) {
  const std::lock_guard lock(mutex_);
  tell(formatted("loss %.2f, probability %.3f", last.loss, last.probability));
}

void TargetProgress::tell(const std::string& detail) const {
  if (progress_)
    progress_({"targets", static_cast<double>(done_), static_cast<double>(facts_),
               formatted("%zu/%zu, ", done_, facts_) + detail});
}

namespace {

constexpr int64_t kFactsOfAPart = 8;  // few, but enough that a part has facts to wait with

// Nothing joins the parts. Where functions are attached to the model's hook points, or GPUs hold it, one run has all
// facts.
void run_in_parts(const models::Model& model, const models::Model& upper, std::span<const TargetProblem> problems,
                  const TargetSpec& spec, const EditContext& context, TargetProgress& told, std::span<Target> targets) {
  if (context.target_lanes > 0 || !std::ranges::all_of(upper.placement().devices(), devices::in_host_memory) ||
      !models::hooks_idle_above(model, 0))
    return optimise_part(model, upper, problems, spec, context, told, targets);
  const size_t n = problems.size();
  const auto parts = static_cast<size_t>(devices::parts_for_cores(std::ssize(problems), kFactsOfAPart, kFactsOfAPart));
  models::side_by_side(model, static_cast<int64_t>(parts), [&](int64_t part) {
    const size_t begin = n * static_cast<size_t>(part) / parts, end = n * static_cast<size_t>(part + 1) / parts;
    const models::Model mine = models::another_view(model);
    const std::optional<models::Model> copy =
        &upper == &model ? std::nullopt : std::optional(models::another_view(upper));
    optimise_part(mine, copy ? *copy : mine, problems.subspan(begin, end - begin), spec, context, told,
                  targets.subspan(begin, end - begin));
  });
}

// The layers above in the dtype that the context asks for; nothing if the model serves as it is.
std::optional<models::Model> copy_for(const models::Model& model, const TargetSpec& spec, const EditContext& context) {
  const auto dtype = context.compute_dtype.value_or(model.dtype());
  if (dtype == model.dtype()) return std::nullopt;
  const int first_layer = first_layer_of(spec);
  if (!models::hooks_idle_above(model, first_layer)) {
    context.log.warning("targets.compute_dtype",
                        std::string("functions are attached to the model's hook points, which a copy in ") +
                            c10::toString(dtype) + " would pass by: targets are optimised in the model's own dtype");
    return std::nullopt;
  }
  return models::compute_copy(model, dtype, first_layer);
}

bool serves(const models::Model* copy, const models::Model& model) {
  return copy && std::ranges::all_of(model.placement().devices(), devices::in_host_memory) &&
         models::hooks_idle_above(model, 0);
}

}  // namespace

std::vector<Target> optimise_fast(const models::Model& model, const std::vector<TargetProblem>& problems,
                                  const TargetSpec& spec, const EditContext& context, TargetProgress& told) {
  std::vector<Target> targets(problems.size());
  const std::optional<models::Model> own = serves(spec.copy, model) ? std::nullopt : copy_for(model, spec, context);
  const models::Model* copy = serves(spec.copy, model) ? spec.copy : own ? &*own : nullptr;
  const devices::Tf32Products products(context.tf32);
  run_in_parts(model, copy ? *copy : model, problems, spec, context, told, targets);
  devices::release_unused_memory();  // activations' blocks are of no use to the solve
  return targets;
}

}  // namespace emend::editors::detail
