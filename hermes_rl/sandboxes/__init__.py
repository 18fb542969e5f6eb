"""Where commands run. Backends are siblings; `hermes_rl.wiring` chooses one by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hermes_rl.lazy import attach

if TYPE_CHECKING:
    from hermes_rl.sandboxes import (
        conformance,
        limits,
        make_seccomp,
        modal_cloud,
        probe,
        processes,
        recipe,
        remote,
        slots,
        watchdog,
        zygote,
    )
    from hermes_rl.sandboxes.apptainer import Apptainer, ApptainerSandbox, SifImages, find_program
    from hermes_rl.sandboxes.background import Background
    from hermes_rl.sandboxes.base import (
        CommandResult,
        Connection,
        GradingResult,
        GradingSpec,
        Process,
        Sandbox,
        SandboxBackend,
        SandboxLimits,
        SandboxSnapshot,
        SandboxSpec,
    )
    from hermes_rl.sandboxes.box import filter_path, launch, marks
    from hermes_rl.sandboxes.bubblewrap import Bubblewrap, BubblewrapSandbox
    from hermes_rl.sandboxes.builds import ImageBuilds, build_options, image_taker, missing_images
    from hermes_rl.sandboxes.conformance import (
        CHECKS,
        KILL_SHELL,
        Check,
        leased_sandbox,
        tells_a_host_fault,
    )
    from hermes_rl.sandboxes.containers import Containers, ContainerSandbox
    from hermes_rl.sandboxes.disks import Storage
    from hermes_rl.sandboxes.egress import Bounds, EgressProxy, open_egress
    from hermes_rl.sandboxes.engine import ENGINES, Engine
    from hermes_rl.sandboxes.files import Beneath, Look
    from hermes_rl.sandboxes.grading import FORMAT, Packing, Unpackable, pack_in_thread, reading
    from hermes_rl.sandboxes.images import BuildOptions, Image, ImageStore
    from hermes_rl.sandboxes.limits import measure, reap_counted
    from hermes_rl.sandboxes.modal_cloud import Modal, ModalSandbox
    from hermes_rl.sandboxes.none import Subprocess
    from hermes_rl.sandboxes.probe import find_binary, probe_machine, reachable
    from hermes_rl.sandboxes.processes import (
        Jobs,
        MarkedProcesses,
        Proc,
        Quiescence,
        Snapshot,
        children,
        find,
        snapshot,
        stop_tree,
    )
    from hermes_rl.sandboxes.programs import BuildFailed
    from hermes_rl.sandboxes.recipe import OPEN_FILES, digest_of, make_etc, solutions
    from hermes_rl.sandboxes.remote import Link, RemoteSandbox
    from hermes_rl.sandboxes.shell import (
        LINE_MAX,
        HeadTail,
        Shell,
        ShellLost,
        ShellPaths,
        supervisor_text,
    )
    from hermes_rl.sandboxes.slots import (
        Held,
        Home,
        Worker,
        default_state_dir,
        first_slot,
        lock,
        reap,
        workers,
    )
    from hermes_rl.sandboxes.snapshots import changes_of
    from hermes_rl.sandboxes.ssh import SshHost, SshHosts
    from hermes_rl.sandboxes.watchdog import memory_folder, remove_tree
else:
    __getattr__, __dir__ = attach(__name__)
