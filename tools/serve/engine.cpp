#include "engine.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <emend/core/error.h>
#include <emend/core/text.h>
#include <emend/devices/route.h>
#include <emend/editors/steps/apply.h>
#include <emend/editors/steps/neurons.h>
#include <emend/models/config.h>
#include <emend/models/products.h>

#include <algorithm>
#include <set>

#include "http.h"

namespace emend::tools::serve {

using hooks::Site;

constexpr int64_t kSetBytes = int64_t{1} << 30;  // of edited matrices that are kept for sets of packs

// A matrix of an MLP whose product can be another one for some rows.
struct Engine::Place {
  models::EditSite matrix;
  Site in, out;
};

// The matrices of a set of packs, as they are with these packs in the weights.
struct Engine::Edited {
  struct Matrix {
    Place place;
    at::Tensor weight_OI, bias_O;
  };
  std::string key;
  std::vector<Matrix> matrices;
  int64_t bytes = 0;
};

struct Engine::Exclusive {
  const PackSet& packs;
  const std::function<void(models::Model&, const editors::RuntimeScope&)>& work;
  std::exception_ptr error;
  bool done = false;
};

std::exception_ptr told() {
  try {
    throw;
  } catch (const c10::OutOfMemoryError& error) {
    return std::make_exception_ptr(Error(ErrorClass::kDevice, {"memory", error.what_without_backtrace(), "", ""}));
  } catch (const c10::Error& error) {
    return std::make_exception_ptr(std::runtime_error(error.what_without_backtrace()));
  } catch (...) {
    return std::current_exception();
  }
}

Engine::Engine(models::Model& model, EngineOptions options)
    : model_(model), options_(options), hooked_(!model.hooks().idle()) {
  const auto& config = model.config();
  token_bytes_ =
      2 * model.n_layers() * config.n_kv_heads * config.head_dim * static_cast<int64_t>(at::elementSize(model.dtype()));
  for (int layer = 0; config.no_edit_site.empty() && layer < model.n_layers(); ++layer) {
    const auto mlp = editors::MlpWeights::of(model, layer);
    places_.push_back({mlp.down, Site::kMlpDownIn, Site::kMlpDownOut});
    if (mlp.fused || !mlp.biases.empty()) continue;
    places_.push_back({mlp.gate, Site::kMlpIn, mlp.gated() ? Site::kMlpGate : Site::kMlpUp});
    if (mlp.gated()) places_.push_back({mlp.up, Site::kMlpIn, Site::kMlpUp});
  }
  thread_ = std::thread([this] { loop(); });
}

void Engine::stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stopping_.request();
  wake_.notify_all();
}

Engine::~Engine() {
  stop();
  thread_.join();
}

int64_t Engine::most_tokens() const {
  return std::min<int64_t>(options_.cache_bytes / token_bytes_, model_.max_positions());
}

int64_t Engine::rows_of(int64_t tokens) const {
  return std::clamp<int64_t>(options_.cache_bytes / (token_bytes_ * tokens), 1, options_.rows);
}

void Engine::submit(std::vector<Task> tasks) {
  const int64_t places = options_.rows + options_.queue;
  if (std::ssize(tasks) > places)
    refuse("prompt, n: " + std::to_string(tasks.size()) + " answers; expected at most " + std::to_string(places) +
           " in one request");
  for (const auto& task : tasks) {
    const auto length = std::ssize(task.prompt) + task.sampling.max_new_tokens;
    const int64_t most = most_tokens();
    if (task.prompt.empty()) refuse("prompt: empty; expected at least one token");
    if (length > most)
      throw HttpError(400,
                      "the text has " + counted(task.prompt.size(), "token") + " and room is asked for " +
                          std::to_string(task.sampling.max_new_tokens) + " more; at most " + std::to_string(most) +
                          " together fit: shorten it, ask for fewer or begin anew",
                      "context_length_exceeded");
  }
  {
    const std::lock_guard lock(mutex_);
    if (stop_) throw HttpError(503, "the server is being stopped");
    if (static_cast<int64_t>(waiting_.size() + tasks.size()) + figures_.running > places)
      throw HttpError(429, "the queue is full; ask again in a moment");
    std::move(tasks.begin(), tasks.end(), std::back_inserter(waiting_));
  }
  wake_.notify_all();
}

void Engine::with(const PackSet& packs, const std::function<void(models::Model&, const editors::RuntimeScope&)>& work) {
  Exclusive mine{packs, work, {}};
  std::unique_lock lock(mutex_);
  if (stop_) throw HttpError(503, "the server is being stopped");
  exclusive_.push_back(&mine);
  wake_.notify_all();
  wake_.wait(lock, [&] { return mine.done; });
  if (mine.error) std::rethrow_exception(mine.error);
}

EngineFigures Engine::figures() const {
  const std::lock_guard lock(mutex_);
  auto figures = figures_;
  figures.waiting = std::ssize(waiting_);
  return figures;
}

void Engine::loop() {
  begin({});
  for (;;) {
    Exclusive* exclusive = nullptr;  // one a turn: rows that run go on between them
    std::vector<Task> joined;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return stop_ || !exclusive_.empty() || !waiting_.empty() || !running_.empty(); });
      if (stop_) break;
      if (!exclusive_.empty()) {
        exclusive = exclusive_.front();
        exclusive_.pop_front();
      }
      joined = admit();
      figures_.running = std::ssize(running_) + std::ssize(joined);
    }
    if (exclusive) run(*exclusive);
    advance(std::move(joined));
  }
  const auto stopped = std::make_exception_ptr(HttpError(503, "the server is being stopped"));
  fail_all(stopped);
  in_force_.reset();
  const std::lock_guard lock(mutex_);
  for (const auto& task : waiting_) task.answer->fail(stopped);
  for (auto* one : exclusive_) {
    one->error = stopped;
    one->done = true;
  }
  wake_.notify_all();
}

// What of the queue can run beside the rows that run. First come, first served: one that cannot yet holds the others.
std::vector<Task> Engine::admit() {
  std::vector<Task> joined;
  int64_t longest = 0;
  const auto room_for = [&](const Task& task) {
    const auto rows = static_cast<int64_t>(running_.size() + joined.size()) + 1;
    const auto length = std::max(longest, std::ssize(task.prompt) + task.sampling.max_new_tokens);
    return rows <= options_.rows && (rows == 1 || rows * length * token_bytes_ <= options_.cache_bytes);
  };
  for (const auto& task : running_) longest = std::max(longest, std::ssize(task.prompt) + task.sampling.max_new_tokens);
  std::string alone = in_force_ && !running_.empty() ? in_force_->key : "";
  while (!waiting_.empty()) {
    Task& task = waiting_.front();
    const bool fits =
        beside(task.packs) ? (running_.empty() && joined.empty()) || alone == key_of(task.packs) : alone.empty();
    if (!task.answer->unwanted() && (!fits || !room_for(task))) break;
    if (task.answer->unwanted()) {
      task.answer->fail(std::make_exception_ptr(HttpError(503, "the time for this request is over")));
    } else {
      if (beside(task.packs)) alone = key_of(task.packs);
      longest = std::max(longest, std::ssize(task.prompt) + task.sampling.max_new_tokens);
      joined.push_back(std::move(task));
    }
    waiting_.pop_front();
  }
  return joined;
}

void Engine::advance(std::vector<Task> joined) {
  try {
    if (!joined.empty()) begin(std::move(joined));
    if (batch_->active() > 0) batch_->step();
  } catch (...) {
    fail_all(told());
  }
  // An answer knows when it has ended.
  std::erase_if(running_, [](const Task& task) { return !task.answer->finish_reason().empty(); });
  for (size_t g = 0; g < groups_.size(); ++g)
    if (std::ranges::none_of(running_, [&](const Task& task) { return task.group == static_cast<int64_t>(g); }))
      groups_[g] = nullptr;
  const std::lock_guard lock(mutex_);
  figures_.running = std::ssize(running_);
  figures_.cache_bytes = batch_->cache_bytes();
  figures_.sets = std::ssize(sets_);
}

void Engine::fail_all(const std::exception_ptr& error) {
  for (const auto& task : running_) task.answer->fail(error);
  running_.clear();
  handles_.clear();
  begin({});
}

// Rows join; without any, the batch begins anew.
void Engine::begin(std::vector<Task> tasks) {
  if (running_.empty()) {
    groups_.clear();
    in_force_.reset();
    batch_ = std::make_unique<models::RunningBatch>(
        model_, [this](const models::TokenBatch& batch, const std::vector<int64_t>& groups) { attach(batch, groups); });
  }
  std::vector<models::BatchRow> rows;
  for (auto& task : tasks) {
    const bool alone = beside(task.packs);
    Shared set;
    try {
      if (alone && !in_force_) in_force_ = std::make_unique<InForce>(model_, task.packs);
      if (!alone && !task.packs.empty()) set = edited(task.packs);
    } catch (...) {
      task.answer->fail(told());  // of this one alone
      continue;
    }
    if (set) {
      auto group = std::ranges::find(groups_, set);
      if (group == groups_.end()) group = std::ranges::find(groups_, nullptr);
      if (group == groups_.end()) group = groups_.insert(group, nullptr);
      *group = set;
      task.group = group - groups_.begin();
    }
    auto sampling = std::make_shared<models::GenerateOptions>(task.sampling);
    const auto answer = task.answer;
    sampling->ends = [this, answer](int64_t, int64_t id) {
      {
        const std::lock_guard lock(mutex_);
        ++figures_.tokens;
      }
      return answer->push(id);
    };
    sampling->on_error = [answer](int64_t, const std::exception_ptr& error) { answer->fail(error); };
    rows.push_back({task.prompt, sampling, task.row, task.group});
    running_.push_back(std::move(task));
  }
  if (!rows.empty()) batch_->add(std::move(rows));
}

// Whether some of it lies elsewhere than in these matrices, or the model has hooks that have to see the edited ones.
bool Engine::beside(const PackSet& packs) const {
  if (hooked_ && !packs.empty()) return true;
  for (const auto& one : packs) {
    if (!one.pack->runtime.empty()) return true;
    for (const auto& delta : one.pack->deltas)
      if (std::ranges::none_of(places_, [&](const Place& place) { return place.matrix.weight_name == delta.weight; }))
        return true;
  }
  return false;
}

Engine::Shared Engine::edited(const PackSet& packs) {
  const std::string key = key_of(packs);
  auto found = std::ranges::find_if(sets_, [&](const Shared& set) { return set->key == key; });
  if (found == sets_.end()) {
    // Rows may still use one that is not kept any more.
    const auto used = std::ranges::find_if(groups_, [&](const Shared& set) { return set && set->key == key; });
    sets_.push_front(used == groups_.end() ? make_edited(packs) : *used);
    int64_t bytes = 0;
    for (const auto& set : sets_) bytes += set->bytes;
    for (; bytes > kSetBytes && sets_.size() > 1; sets_.pop_back()) bytes -= sets_.back()->bytes;
  } else {
    sets_.splice(sets_.begin(), sets_, found);
  }
  return sets_.front();
}

Engine::Shared Engine::make_edited(const PackSet& packs) {
  auto made = std::make_shared<Edited>();
  made->key = key_of(packs);
  for (const auto& place : places_) {
    const auto& matrix = place.matrix;
    const at::Tensor stored = model_.weight(matrix.weight_name).detach();
    const at::Tensor original_OI = matrix.orientation == models::Orientation::kInOut ? stored.t() : stored;
    at::Tensor weight_OI = original_OI;
    for (const auto& one : packs)
      for (const auto& delta : one.pack->deltas)
        if (delta.weight == matrix.weight_name) weight_OI = editors::changed_by(delta, weight_OI);
    if (weight_OI.is_same(original_OI)) continue;
    made->bytes += static_cast<int64_t>(weight_OI.nbytes());
    made->matrices.push_back(
        {place, weight_OI, matrix.bias_name.empty() ? at::Tensor() : model_.weight(matrix.bias_name)});
  }
  return made;
}

// For one pass: where rows want other matrices, their part of the product is computed with those.
void Engine::attach(const models::TokenBatch& batch, const std::vector<int64_t>& groups) {
  handles_.clear();
  std::set<int64_t> used(groups.begin(), groups.end());
  for (const int64_t group : used) {
    const Shared set = group < 0 ? nullptr : groups_[group];
    if (!set) continue;
    std::vector<int64_t> tokens;
    for (int64_t r = 0; r < batch.rows(); ++r)
      for (int64_t k = 0; groups[r] == group && k < batch.length(r); ++k) tokens.push_back(batch.token(r, k));
    const bool all = used.size() == 1;
    const at::Tensor index = at::tensor(tokens, at::kLong);
    for (const auto& matrix : set->matrices) {
      auto pair = editors::detail::attach_answer(
          model_, matrix.place.in, matrix.place.out, matrix.place.matrix.layer,
          [matrix, index, all](const at::Tensor& keys, const at::Tensor& y) {
            if (all) return models::product(keys, matrix.weight_OI, matrix.bias_O);
            const at::Tensor here = devices::route_like(index, y, devices::Purpose::kInput);
            return y.index_copy(0, here, models::product(keys.index_select(0, here), matrix.weight_OI, matrix.bias_O));
          });
      std::move(pair.begin(), pair.end(), std::back_inserter(handles_));
    }
  }
}

void Engine::run(Exclusive& exclusive) {
  handles_.clear();
  // Packs that are in the model for the rows that run stand aside meanwhile.
  const PackSet aside = in_force_ && !running_.empty() ? running_.front().packs : PackSet();
  in_force_.reset();
  try {
    const InForce scope(model_, exclusive.packs);
    exclusive.work(model_, scope.runtime());
  } catch (...) {
    exclusive.error = told();
  }
  try {
    if (!aside.empty()) in_force_ = std::make_unique<InForce>(model_, aside);
  } catch (...) {
    fail_all(told());
  }
  const std::lock_guard lock(mutex_);
  exclusive.done = true;
  wake_.notify_all();
}

}  // namespace emend::tools::serve
