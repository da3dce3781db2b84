"""Mistakes in what the adapters for verl and OpenRLHF read, refuse and say; and in how a CPU runs them."""

from __future__ import annotations

from mutants.mutation import Mutation

_VERL, _OPENRLHF = "adapters/spec_plugin_verl_check/options.py", "adapters/spec_plugin_openrlhf/options.py"
_GATE = "adapters/spec_plugin_verl/gate.py"
_WEIGHTS, _STANDALONE = (f"adapters/spec_plugin_verl/{name}.py" for name in ("weights", "standalone"))
_CHECKPOINTS = "adapters/spec_plugin_openrlhf/checkpoints.py"
_KILLED = (
    "test_openrlhf_checkpoints.py::test_a_run_that_was_killed_while_it_saved_resumes_with_the_draft_of_the_latest_checkpoint",
)
_REFUSED = ("test_check_command_verl.py::test_an_objection_names_the_option_and_what_to_do",)

MUTATIONS = (
    Mutation(
        "adapters/spec_plugin_verl/rollout.py",
        "if self._ensure_server_handle():",
        "if not self._ensure_server_handle():",
        "a run whose engine was killed waits without an end at the next weight sync",
        ("test_verl_adapter.py::test_no_weight_is_sent_to_an_engine_that_has_died",),
    ),
    Mutation(
        "spec_plugin/conformance/forks/stand_in.py",
        'if os.environ.get("RAY_RAYLET_PID") == str(parent):',
        "if False:",
        "where Ray's raylet is killed, the forked workers outlive it",
        (
            "conformance/test_forks.py::test_a_worker_of_ray_ends_with_its_raylet_and_other_processes_outlive_their_starter",
        ),
    ),
    Mutation(
        _CHECKPOINTS,
        "return beside if beside.is_dir() else folder",
        "return folder",
        "a run that was killed while OpenRLHF saved resumes with a draft that knows nothing",
        _KILLED,
    ),
    Mutation(
        _CHECKPOINTS,
        "    shutil.rmtree(checkpoints / _WAITING, ignore_errors=True)\n    return checkpoints",
        "    return checkpoints",
        "what a killed save has left is mixed with the next one's",
        _KILLED,
    ),
    Mutation(
        _CHECKPOINTS,
        "        shutil.rmtree(theirs / _OURS, ignore_errors=True)  # of this step, before a run went back\n",
        "",
        "law 6: a checkpoint of a step that was saved before turns speculation off",
        ("test_openrlhf_checkpoints.py::test_the_same_step_again_after_the_run_went_back",),
    ),
    Mutation(
        "adapters/spec_plugin_openrlhf/turns.py",
        "LAST_VERSION: max(last)",
        "LAST_VERSION: min(last)",
        "law 3: a response that a newer policy ended passes for one of the older",
        ("test_openrlhf_turns.py",),
    ),
    Mutation(
        "adapters/spec_plugin_openrlhf/turns.py",
        "if tuple(document[: len(turn.tokens)]) == turn.tokens]",
        "]",
        "law 3: a turn that did not become part of the response speaks for it",
        ("test_openrlhf_turns.py",),
    ),
    Mutation(
        "adapters/spec_plugin_verl_check/options.py",
        '"top_p": rollout.top_p,',
        '"top_p": 1.0,',
        "law 3: truncated sampling is not known of, and its log-probs are compared all the same",
        ("test_check_command_verl.py::test_lossy_engine_options_and_truncated_sampling_in_the_loss_are_refused",),
    ),
    Mutation(
        _VERL,
        "if (size := rollout.pipeline_model_parallel_size) != 1:",
        "if (size := rollout.pipeline_model_parallel_size) < 1:",
        "pipeline parallel engines, where no draft shares the target's weights, start",
        _REFUSED,
    ),
    Mutation(
        _VERL,
        'return "merged" if options.get("merge") else "adapter"',
        'return "merged"',
        "LoRA adapters reach the engine unmerged",
        ("test_check_command_verl.py::test_adapters_in_the_engine_are_taken_where_verl_itself_can_serve_them",),
    ),
    Mutation(
        _VERL,
        '"tensor_parallel_size": ("an engine of another size than its replica", rollout.tensor_model_parallel_size),',
        "",
        "an engine of another size than its replica starts",
        _REFUSED,
    ),
    Mutation(
        _VERL,
        "elif mode == APART and hybrid:",
        "elif mode == APART and not hybrid:",
        "rollouts both beside the actors and apart from them start",
        _REFUSED,
    ),
    Mutation(
        _OPENRLHF,
        "flags.lora_rank > 0,",
        "flags.lora_rank > 1024,",
        "LoRA, whose adapters vLLM does not load from OpenRLHF, starts",
        ("test_check_command.py::test_openrlhf_objections_name_the_flag_and_what_to_do",),
    ),
    Mutation(
        _OPENRLHF,
        'flags.param_dtype != "bf16",',
        'flags.param_dtype == "fp32",',
        "actors of another dtype than the engine start",
        ("test_check_command.py::test_openrlhf_objections_name_the_flag_and_what_to_do",),
    ),
    Mutation(
        _GATE,
        "raise LosslessError(self._spec_problem)",
        "logger.warning(self._spec_problem)",
        "law 2: an engine that does not sample from the target rolls out all the same",
        ("test_verl_gate.py::test_law_2_an_engine_that_does_not_sample_from_the_target_never_opens",),
    ),
    Mutation(
        _GATE,
        "self._spec_front.interrupted = True",
        "self._spec_front.interrupted = False",
        "law 3: nobody knows that responses were cut short and went on under another policy",
        ("test_verl_gate.py::test_cutting_requests_short_is_noticed",),
    ),
    Mutation(
        "spec_plugin/engine/sleep.py",
        "if again := [part for part in PARTS if part not in before]:",
        "if again := [part for part in PARTS if part in before]:",
        "an engine that slept is left awake in the trainer's memory",
        ("engine/test_sleep.py",),
    ),
    Mutation(
        "spec_plugin/engine/schedule/pause.py",
        'if arguments.get("dummy_run"):',
        'if arguments.get("dummy"):',
        "a paused draft leaves the ranks that keep step with it waiting",
        ("engine/test_pause.py",),
    ),
    Mutation(
        "adapters/spec_plugin_verl/weights.py",
        "        if not base_sync_done:\n            self._base = tap.kept\n            return False\n",
        "        if not base_sync_done:\n            self._base = tap.kept\n",
        "the draft is tested on the base, whose adapters are yet to come",
        ("test_verl_adapters.py",),
    ),
    Mutation(
        _WEIGHTS,
        "            self._base = tap.kept\n            return False\n",
        "            return True\n",
        "verl with adapters: the phase begins between the two streams of the first sync, with a draft that has no embedding",
        ("test_verl_adapters.py",),
    ),
    Mutation(
        _WEIGHTS,
        "tap.kept |= self._base",
        "pass",
        "verl with adapters: embedding and head are forgotten at the second sync",
        ("test_verl_adapters.py",),
    ),
    Mutation(
        _STANDALONE,
        "self._error, problem = error, str(error) or type(error).__name__",
        "problem = str(error) or type(error).__name__",
        "law 2: separate_async: a failed self-test in the thread stops nothing",
        ("test_verl_standalone.py",),
    ),
    Mutation(
        _STANDALONE,
        "self._thread.join()\n            self._thread = None",
        "self._thread = None",
        "separate_async: an update begins while the phase before it still begins",
        ("test_verl_standalone.py",),
    ),
    Mutation(
        "adapters/spec_plugin_verl/batches.py",
        "return (-1, -1) if low is None or high is None else (int(low), int(high))",
        "return (int(low or 0), int(high or 0))",
        "law 3: verl: a sequence of unknown version is taken for one of version 0",
        ("test_verl_batches.py", "test_verl_adapter.py"),
    ),
    Mutation(
        "adapters/spec_plugin_verl/actor.py",
        "or self.engine_config.forward_only or self._without_adapter:",
        "or self.engine_config.forward_only:",
        "law 3: a LoRA run stops because its reference's log-probs are not the policy's, and the draft learns the base's states",
        ("test_verl_passes.py",),
    ),
    Mutation(
        "adapters/spec_plugin_verl/actor.py",
        "        finally:\n            self._without_adapter = False\n",
        "        finally:\n            pass\n",
        "law 3: behind the reference's pass nothing is judged any more",
        ("test_verl_passes.py",),
    ),
    Mutation(
        "adapters/spec_plugin_verl/actor.py",
        "tu.assign_non_tensor(few, distillation_use_topk=False, distillation_only=False)",
        "pass",
        "a run that distils and bypasses the log-prob pass dies of the one that is made for it",
        ("test_verl_passes.py",),
    ),
    Mutation(
        _VERL,
        '"enable_expert_parallel": ("expert parallel engines", False),',
        "",
        "expert parallel engines start by vLLM's own option",
        _REFUSED,
    ),
    Mutation(
        "adapters/spec_plugin_verl_check/actors.py",
        'if getattr(getattr(options, "router_replay", None), "mode", None) == "R3":',
        "if False:",
        "the routes of drafted tokens that were rejected reach the actor",
        ("test_check_command_verl.py",),
    ),
    Mutation(
        _VERL,
        "and lora(model) is None and wanted and misses_an_adapter():",
        "and wanted and misses_an_adapter():",
        "LoRA runs that begin with an adapter are refused",
        ("test_check_command_lora.py",),
    ),
    Mutation(
        "adapters/spec_plugin_verl_check/fields.py",
        "        fields |= above\n",
        "        pass\n",
        "options that a dataclass of verl's has from the one above it are refused",
        ("test_check_command_fields.py",),
    ),
    Mutation(
        "adapters/spec_plugin_verl_check/fields.py",
        'yield replace(objection, instead="leave it out") if lost else objection',
        "yield objection",
        "who follows the advice to append an option with a plus gets a run that dies of it",
        ("test_check_command_fields.py::test_a_plus_is_not_advised_where_the_dataclass_lacks_the_option_too",),
    ),
    Mutation(
        "spec_plugin/commands/cache.py",
        "rank + turned if rank else 2 * heads * width",
        "2 * heads * width",
        "the check says that a draft of plain heads takes no more cache than a layer of latent attention",
        ("test_cache_share.py",),
    ),
)
