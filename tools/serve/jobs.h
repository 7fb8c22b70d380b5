// Edits as jobs, one after the other, on a second copy of the model, so that answers go on meanwhile.
//
// Each edit starts from the unedited model and becomes a pack for it. A job that is cancelled or fails gives its copy
// every byte back and leaves no file.
#pragma once

#include <emend/core/cancel.h>
#include <emend/datasets/fact.h>
#include <emend/models/model.h>
#include <emend/workflow/handles.h>
#include <emend/workflow/options.h>

#include <condition_variable>
#include <deque>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "http.h"
#include "pack_folder.h"

namespace emend::tools::serve {

class Jobs {
 public:
  using Prepare = std::function<void(workflow::RunOptions&, const datasets::FactSet&)>;
  /// `load` makes the second copy; it is called before the first job. `prepare` completes the options of a
  /// request and throws for what cannot be run. What servers have left in the folder `work` goes.
  Jobs(std::function<models::Model()> load, Prepare prepare, PackFolder& packs, std::filesystem::path work,
       workflow::RunOptions defaults, workflow::Handles lent);
  ~Jobs();
  void stop();  ///< cancels what runs and what waits

  /// {"facts": […], "editor", "name", "settings": {}, "hparams", "seed", "eval": […], "active": true} → {"id": …}.
  /// Throws HttpError 400 for what can be seen to be wrong at once, 409 for a name that is taken, 429 if too many wait.
  nlohmann::ordered_json add(const nlohmann::json& request);
  [[nodiscard]] nlohmann::ordered_json list() const;
  [[nodiscard]] nlohmann::ordered_json describe(const std::string& id) const;  ///< throws HttpError 404
  /// Stops it between two steps; of one that is over, nothing changes.
  nlohmann::ordered_json cancel(const std::string& id);
  /// What happens, from the first event on, until the job is over or the client has gone.
  [[nodiscard]] std::function<void(const Write&)> events(const std::string& id) const;
  [[nodiscard]] std::string report(const std::string& id) const;  ///< its page
  /// Runs `work` on the second copy, with these packs in it, before the jobs that wait, and waits for it.
  void with(const PackSet& packs, const std::function<void(models::Model&, const CancelToken&)>& work);

 private:
  struct Job;
  using JobPtr = std::shared_ptr<Job>;
  [[nodiscard]] JobPtr find(const std::string& id) const;
  [[nodiscard]] nlohmann::ordered_json describe(const Job& job) const;
  void enqueue(const JobPtr& job);
  void loop();
  void run(Job& job);
  void edit(Job& job);
  void tell(Job& job, nlohmann::ordered_json event) const;
  void progress(Job& job, const ProgressUpdate& update) const;
  void forget_old();

  const std::function<models::Model()> load_;
  const Prepare prepare_;
  PackFolder& packs_;
  const std::filesystem::path work_;
  const workflow::RunOptions defaults_;
  const workflow::Handles lent_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::vector<JobPtr> jobs_;
  std::deque<JobPtr> queue_;
  JobPtr running_;
  bool stop_ = false;
  int64_t number_ = 0;
  std::optional<models::Model> model_;  ///< of the thread alone
  std::thread thread_;
};

}  // namespace emend::tools::serve
