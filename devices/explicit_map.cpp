// Applying an explicit map of module names to a model.
#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/devices/device_map.h>

#include <algorithm>

namespace emend::devices {
namespace {

/// True if `name` is `prefix` or lies below it.
bool is_below(const std::string& name, const std::string& prefix) {
  return prefix.empty() || name == prefix ||
         (name.size() > prefix.size() && name.starts_with(prefix) && name[prefix.size()] == '.');
}

class ExplicitMap {
 public:
  ExplicitMap(const DeviceMapSpec& spec, const ModuleNames& names, int64_t n_layers, bool tied)
      : spec_(spec), names_(names), n_layers_(n_layers), tied_(tied) {
    add(names.embedding);
    add(names.position);
    for (int64_t l = 0; l < n_layers; ++l) known_.push_back(names.layer(l));
    add(names.final_norm);
    add(names.head);
  }

  PlacementPlan apply(std::vector<std::string>& warnings) {
    for (const auto& [key, device] : spec_.modules) check_key(key, device);
    refuse_gaps();
    auto plan = PlacementPlan::single(device_of_part(names_.embedding), 0);
    if (!names_.position.empty()) plan.position = device_of_part(names_.position);
    for (int64_t l = 0; l < n_layers_; ++l) plan.layers.push_back(*find(names_.layer(l)));
    plan.final_norm = device_of_part(names_.final_norm);
    plan.head = head_is_named() ? device_of_part(names_.head) : plan.embedding;
    if (tied_ && plan.head != plan.embedding) {
      plan.tied_copy = true;
      warnings.push_back(spec_.source + ": the head is tied to the embedding but is put on " + to_string(plan.head) +
                         " and not on " + to_string(plan.embedding) + ": it becomes a copy, which takes memory twice");
    }
    if (!plan.is_monotone())
      warnings.push_back(spec_.source +
                         ": the layers leave a device and come back to it, which costs a transfer each time");
    return plan;
  }

 private:
  void add(const std::vector<std::string>& names) { known_.insert(known_.end(), names.begin(), names.end()); }

  /// The device of the longest key that covers a module.
  [[nodiscard]] std::optional<c10::Device> find(const std::string& module) const {
    std::optional<c10::Device> best;
    size_t longest = 0;
    for (const auto& [key, device] : spec_.modules)
      if (is_below(module, key) && (!best || key.size() > longest)) {
        best = device;
        longest = key.size();
      }
    return best;
  }

  [[nodiscard]] bool head_is_named() const { return find(names_.head.front()).has_value(); }

  /// Every key must stand for known modules, or agree with the block that it lies in.
  void check_key(const std::string& key, c10::Device device) const {
    for (const auto& module : known_)
      if (is_below(module, key)) return;
    for (const auto& module : known_) {
      if (!is_below(key, module)) continue;
      const auto whole = find(module);
      if (whole && *whole == device) return;
      throw Error(ErrorClass::kInvalidArgument,
                  {spec_.source,
                   "\"" + key + "\" on " + to_string(device) + " would split the block \"" + module + "\"" +
                       (whole ? ", which is on " + to_string(*whole) : ""),
                   "every block on one device", "write \"" + module + "\": \"" + to_string(device) + "\" instead"});
    }
    for (const auto& module : names_.ignored)
      if (is_below(key, module) || is_below(module, key)) return;
    throw Error(ErrorClass::kInvalidArgument, {spec_.source, "the model has no module \"" + key + "\"",
                                               "names such as \"" + names_.embedding.front() + "\" or \"" +
                                                   names_.layer(0) + "\" to \"" + names_.layer(n_layers_ - 1) + "\"",
                                               did_you_mean(key, known_)});
  }

  void refuse_gaps() const {
    std::vector<std::string> missing;
    for (const auto& module : known_) {
      const bool is_head = std::find(names_.head.begin(), names_.head.end(), module) != names_.head.end();
      if (!find(module) && !(tied_ && is_head)) missing.push_back(module);
    }
    if (missing.empty()) return;
    std::string list;
    for (size_t i = 0; i < missing.size() && i < 4; ++i) list += (i ? ", " : "") + missing[i];
    if (missing.size() > 4) list += " and " + std::to_string(missing.size() - 4) + " more";
    throw Error(ErrorClass::kInvalidArgument, {spec_.source, "the map leaves out " + list, "a device for every module",
                                               "add them, or \"\": \"cpu\" for all that is not listed"});
  }

  /// All names of a part must be on the device of the first.
  [[nodiscard]] c10::Device device_of_part(const std::vector<std::string>& part) const {
    const auto home = *find(part.front());
    for (const auto& module : part)
      if (*find(module) != home)
        throw Error(ErrorClass::kInvalidArgument, {spec_.source, "\"" + module + "\" is on " + to_string(*find(module)),
                                                   to_string(home) + ", where \"" + part.front() + "\" is", ""});
    return home;
  }

  const DeviceMapSpec& spec_;
  const ModuleNames& names_;
  const int64_t n_layers_;
  const bool tied_;
  std::vector<std::string> known_;
};

}  // namespace

PlacementPlan place_explicitly(const DeviceMapSpec& spec, const ModuleNames& names, int64_t n_layers, bool tied,
                               std::vector<std::string>& warnings) {
  return ExplicitMap(spec, names, n_layers, tied).apply(warnings);
}

}  // namespace emend::devices
