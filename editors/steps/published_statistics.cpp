#include <ATen/ATen.h>
#include <emend/core/error.h>
#include <emend/core/npz.h>
#include <emend/editors/steps/statistics.h>

namespace emend::editors {
namespace {

constexpr std::string_view kPlace = "{layer}";

class PublishedStatistics final : public StatisticsProvider {
 public:
  PublishedStatistics(std::string pattern, Log log) : pattern_(std::move(pattern)), log_(std::move(log)) {}

  void prepare(const models::Model& model, const std::vector<int>& layers) override {
    if (layers.size() > 1 && pattern_.find(kPlace) == std::string::npos)
      throw Error(ErrorClass::kInvalidArgument,
                  {"published statistics", "\"" + pattern_ + "\" for " + std::to_string(layers.size()) + " layers",
                   "a pattern with {layer} in it", "write {layer} where the file names differ"});
    for (const int layer : layers) {
      if (moments_.contains(layer)) continue;
      const auto path = path_of(layer);
      SecondMoment moment = read_published_moment(path);
      const int64_t width = model.edit_site(layer).in_features;
      if (moment.width() != width)
        throw Error(ErrorClass::kInvalidArgument, {path.string(), "a moment of width " + std::to_string(moment.width()),
                                                   "width " + std::to_string(width) + ", that of this model's keys",
                                                   "use the statistics of this model and layer"});
      log_.info("statistics.published", "statistics of layer " + std::to_string(layer) + " from " + path.string());
      moments_.emplace(layer, std::move(moment));
    }
  }

  [[nodiscard]] const SecondMoment& get(int layer) const override {
    const auto found = moments_.find(layer);
    if (found == moments_.end())
      throw Error(ErrorClass::kInvalidArgument, {"statistics", "layer " + std::to_string(layer) + " was not prepared",
                                                 "a prepared layer", "call prepare first"});
    return found->second;
  }

  [[nodiscard]] nlohmann::json describe() const override {
    nlohmann::json json = {{"source", "published"}, {"pattern", pattern_}, {"files", nlohmann::json::array()}};
    for (const auto& [layer, moment] : moments_) json["files"].push_back(moment.origin());
    if (!moments_.empty()) json["tokens"] = moments_.begin()->second.count();
    return json;
  }

 private:
  [[nodiscard]] std::filesystem::path path_of(int layer) const {
    std::string path = pattern_;
    for (size_t at; (at = path.find(kPlace)) != std::string::npos;)
      path.replace(at, kPlace.size(), std::to_string(layer));
    return path;
  }

  std::string pattern_;
  Log log_;
  std::map<int, SecondMoment> moments_;
};

}  // namespace

SecondMoment read_published_moment(const std::filesystem::path& path) {
  const NpzFile file(path);
  const at::Tensor stored = file.read("mom2.mom2");
  const auto refuse = [&](const std::string& got) {
    throw Error(ErrorClass::kCorruption,
                {path.string(), got, "a finite symmetric matrix of floats in \"mom2.mom2\"", "fetch the file again"});
  };
  if (!at::isFloatingType(stored.scalar_type()) || stored.dim() != 2 || stored.size(0) != stored.size(1))
    refuse("a " + std::string(c10::toString(stored.scalar_type())) + " array of " + std::to_string(stored.dim()) +
           " dimensions");
  const at::Tensor cov_FF = stored.scalar_type() == at::kDouble ? stored : stored.to(at::kFloat);
  if (!at::isfinite(cov_FF).all().item<bool>()) refuse("NaN or infinite entries");
  // Sums in float32 leave a trace of asymmetry.
  if (!at::allclose(cov_FF, cov_FF.t(), 1e-3, 1e-3 * cov_FF.abs().max().item<double>())) refuse("an asymmetric matrix");
  const int64_t count = file.contains("mom2.count") ? file.read("mom2.count").to(at::kLong).item<int64_t>() : 0;
  return SecondMoment((cov_FF + cov_FF.t()) / 2, count,
                      {{"file", path.filename().string()}, {"tokens", count}, {"members", file.names()}});
}

std::unique_ptr<StatisticsProvider> make_published_statistics(std::string pattern, Log log) {
  return std::make_unique<PublishedStatistics>(std::move(pattern), std::move(log));
}

}  // namespace emend::editors
