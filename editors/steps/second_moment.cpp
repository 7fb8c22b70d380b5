// Second moments as values and as files, and what provides given ones.
#include <ATen/ATen.h>
#include <emend/core/cache_folder.h>
#include <emend/core/json.h>
#include <emend/core/npz.h>
#include <emend/core/text.h>
#include <emend/devices/route.h>
#include <emend/editors/detail/statistics_parts.h>
#include <emend/editors/steps/solver.h>

#include <mutex>

namespace emend::editors {
namespace {

constexpr const char* kFormat = "emend second moment 1";
constexpr const char* kFactorFormat = "emend second moment factor 1";

std::string factor_key(at::ScalarType dtype, const at::Tensor& like) {
  return std::string(c10::toString(dtype)) + " " + devices::to_string(like.device());
}

const std::string& in_header(const SafetensorsFile& file, const std::string& name) {
  const auto found = file.metadata().find(name);
  if (found == file.metadata().end()) refuse({"", "no \"" + name + "\" in the header", "", ""});
  return found->second;
}

// Throws where the file is of another kind or made under another key.
void require_of(const SafetensorsFile& file, const std::string& format, const std::string& key) {
  for (const auto& [name, expected] : {std::pair("format", format), std::pair("key", key)})
    if (const std::string& got = in_header(file, name); got != expected)
      refuse({"", std::string(name) + " \"" + got + "\"", "", ""});
}

// The stored factor; nothing if there is none or it is damaged: then it is made again.
std::optional<SpdFactor> load_factor(const std::filesystem::path& path, const std::string& key, int64_t width) {
  try {
    const auto file = open_cached(path);
    if (!file) return std::nullopt;
    require_of(*file, kFactorFormat, key);
    const at::Tensor lower_FF = file->tensor("lower");
    if (lower_FF.scalar_type() != at::kDouble || lower_FF.sizes() != at::IntArrayRef{width, width}) return std::nullopt;
    return SpdFactor::from_parts(lower_FF.clone(), std::stod(file->metadata().at("jitter")));
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

void save_factor(const std::filesystem::path& path, const std::string& key, const SpdFactor& factor) {
  write_checked(path, {{"lower", devices::to_host(factor.lower_FF(), devices::Purpose::kStatistics).contiguous()}},
                {{"format", kFactorFormat}, {"key", key}, {"jitter", formatted("%.17g", factor.jitter())}});
}

}  // namespace

struct SecondMoment::State {
  at::Tensor cov_FF;
  int64_t count = 0;
  nlohmann::json origin;
  std::mutex mutex;
  std::map<std::string, SpdFactor> factors;
  std::filesystem::path factor_path;  // empty: factors are not stored
  std::string factor_file_key;

  [[nodiscard]] bool stores(at::ScalarType dtype) const { return dtype == at::kDouble && !factor_path.empty(); }
};

SecondMoment::SecondMoment(at::Tensor cov_FF, int64_t count, nlohmann::json origin)
    : state_(std::make_shared<State>()) {
  if (cov_FF.dim() != 2 || cov_FF.size(0) != cov_FF.size(1))
    refuse({"second moment", "a tensor that is not square", "[F,F]", ""});
  if (cov_FF.scalar_type() != at::kFloat && cov_FF.scalar_type() != at::kDouble)
    refuse({"second moment", c10::toString(cov_FF.scalar_type()), "float32 or float64", ""});
  if (!at::isfinite(cov_FF).all().item<bool>())
    throw Error(ErrorClass::kNumeric, {"second moment", "NaN or infinite entries", "finite numbers",
                                       "see whether the model is damaged (emend doctor)"});
  state_->cov_FF = std::move(cov_FF);
  state_->count = count;
  state_->origin = std::move(origin);
}

const at::Tensor& SecondMoment::cov_FF() const {
  if (!state_) refuse({"second moment", "an empty one", "one that was made of a matrix", ""});
  return state_->cov_FF;
}
int64_t SecondMoment::width() const {
  return cov_FF().size(0);
}
int64_t SecondMoment::count() const {
  return state_ ? state_->count : 0;
}
const nlohmann::json& SecondMoment::origin() const {
  return state_->origin;
}

SpdFactor SecondMoment::factor(at::ScalarType dtype, const at::Tensor& like) const {
  const std::lock_guard lock(state_->mutex);
  const std::string key = factor_key(dtype, like);
  if (const auto found = state_->factors.find(key); found != state_->factors.end()) return found->second;
  if (state_->stores(dtype)) {
    if (const auto stored = load_factor(state_->factor_path, state_->factor_file_key, width()))
      return state_->factors
          .emplace(key,
                   SpdFactor::from_parts(devices::route_like(stored->lower_FF(), like, devices::Purpose::kStatistics),
                                         stored->jitter()))
          .first->second;
  }
  const at::Tensor cov_FF = devices::route_like(state_->cov_FF, like, devices::Purpose::kStatistics);
  const SpdFactor& made =
      state_->factors.emplace(key, SpdFactor::of(cov_FF, dtype, "the second moment of the keys")).first->second;
  if (state_->stores(dtype))  // the moment itself has told of a folder that cannot be written to
    keep_if_possible(Log(), "", [&] { save_factor(state_->factor_path, state_->factor_file_key, made); });
  return made;
}

void SecondMoment::keep_factor_at(const std::filesystem::path& path, const std::string& key,
                                  int64_t least_width) const {
  if (width() < least_width) return;
  const std::lock_guard lock(state_->mutex);
  state_->factor_path = path;
  state_->factor_file_key = key;
}

void save_second_moment(const std::filesystem::path& path, const SecondMoment& moment, const std::string& key) {
  const at::Tensor cov_FF = devices::to_host(moment.cov_FF(), devices::Purpose::kStatistics).contiguous();
  write_checked(path, {{"cov", cov_FF}},
                {{"format", kFormat},
                 {"key", key},
                 {"count", std::to_string(moment.count())},
                 {"origin", moment.origin().dump()}});
}

std::optional<SecondMoment> load_second_moment(const std::filesystem::path& path, const std::string& key) {
  const auto file = open_cached(path);
  if (!file) return std::nullopt;
  try {
    require_of(*file, kFormat, key);
    return SecondMoment(file->tensor("cov").clone(), std::stoll(in_header(*file, "count")),
                        parse_json(in_header(*file, "origin"), "origin"));
  } catch (const std::exception& error) {
    throw Error(ErrorClass::kCorruption,
                {path.string(), error.what(), "a statistics file of emend, with the key " + key,
                 "delete the file; it will be computed again"});
  }
}

const SecondMoment& detail::prepared(const std::map<int, SecondMoment>& moments, int layer) {
  const auto found = moments.find(layer);
  if (found == moments.end())
    refuse({"statistics", "layer " + std::to_string(layer) + " was not prepared", "a prepared layer",
            "call prepare first"});
  return found->second;
}

namespace {

constexpr std::string_view kPlace = "{layer}";

class PublishedStatistics final : public StatisticsProvider {
 public:
  PublishedStatistics(std::string pattern, Log log) : pattern_(std::move(pattern)), log_(std::move(log)) {}

  void prepare(const models::Model& model, const std::vector<int>& layers) override {
    if (layers.size() > 1 && pattern_.find(kPlace) == std::string::npos)
      refuse({"published statistics", "\"" + pattern_ + "\" for " + std::to_string(layers.size()) + " layers",
              "a pattern with {layer} in it", "write {layer} where the file names differ"});
    for (const int layer : layers) {
      if (moments_.contains(layer)) continue;
      const auto path = path_of(layer);
      SecondMoment moment = read_published_moment(path);
      const int64_t width = model.edit_site(layer).in_features;
      if (moment.width() != width)
        refuse({path.string(), "a moment of width " + std::to_string(moment.width()),
                "width " + std::to_string(width) + ", that of this model's keys",
                "use the statistics of this model and layer"});
      log_.info("statistics.published", "statistics of layer " + std::to_string(layer) + " from " + path.string());
      moments_.emplace(layer, std::move(moment));
    }
  }

  [[nodiscard]] const SecondMoment& get(int layer) const override { return detail::prepared(moments_, layer); }

  [[nodiscard]] nlohmann::json describe() const override {
    nlohmann::json json = {{"source", "published"}, {"pattern", pattern_}, {"files", nlohmann::json::array()}};
    for (const auto& [layer, moment] : moments_) json["files"].push_back(moment.origin());
    if (!moments_.empty()) json["tokens"] = moments_.begin()->second.count();
    return json;
  }

 private:
  [[nodiscard]] std::filesystem::path path_of(int layer) const {
    return replace_all(pattern_, kPlace, std::to_string(layer));
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
    throw Error(
        ErrorClass::kCorruption,
        {path.string(), got,
         "a finite symmetric matrix of floats in \"mom2.mom2\", the sum over the tokens that \"mom2.count\" says",
         "fetch the file again"});
  };
  if (!at::isFloatingType(stored.scalar_type()) || stored.dim() != 2 || stored.size(0) != stored.size(1))
    refuse("a " + std::string(c10::toString(stored.scalar_type())) + " array of " + std::to_string(stored.dim()) +
           " dimensions");
  const int64_t count = file.contains("mom2.count") ? file.read("mom2.count").to(at::kLong).item<int64_t>() : 0;
  if (count < 1) refuse("no number of tokens above 0 in \"mom2.count\"");
  const at::Tensor cov_FF = stored.to(at::kDouble) / static_cast<double>(count);
  if (!at::isfinite(cov_FF).all().item<bool>()) refuse("NaN or infinite entries");
  // Sums in float32 leave a trace of asymmetry.
  if (!at::allclose(cov_FF, cov_FF.t(), 1e-3, 1e-3 * cov_FF.abs().max().item<double>())) refuse("an asymmetric matrix");
  return SecondMoment((cov_FF + cov_FF.t()) / 2, count,
                      {{"file", path.filename().string()}, {"tokens", count}, {"members", file.names()}});
}

void FixedStatistics::prepare(const models::Model& model, const std::vector<int>& layers) {
  for (const int layer : layers) {
    const auto found = moments_.find(layer);
    const int64_t width = model.edit_site(layer).in_features;
    if (found != moments_.end() && found->second.width() == width) continue;
    refuse({"statistics of layer " + std::to_string(layer),
            found == moments_.end() ? "none" : "width " + std::to_string(found->second.width()),
            "a second moment of width " + std::to_string(width), "use statistics of this model"});
  }
}

const SecondMoment& FixedStatistics::get(int layer) const {
  return detail::prepared(moments_, layer);
}

nlohmann::json FixedStatistics::describe() const {
  return {{"source", "given"}, {"layers", moments_.size()}};
}

std::unique_ptr<StatisticsProvider> make_published_statistics(std::string pattern, Log log) {
  return std::make_unique<PublishedStatistics>(std::move(pattern), std::move(log));
}

}  // namespace emend::editors
