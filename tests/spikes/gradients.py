"""An asynchronous actor-critic in small: gradients are computed beside the actors, and the learner applies them."""

from collections import deque
from dataclasses import replace

import torch

from algorithms.appo.algorithm import APPO
from algorithms.appo.learner import Learner, cleaned
from algorithms.runtime.learning.batches import Batch
from algorithms.runtime.learning.gradients import GRADIENT, GradientRing, GradientSource
from algorithms.runtime.memory.learner_state import StateBlock
from algorithms.runtime.memory.slots import LearnerLedger
from algorithms.runtime.messages import Address, SlotReleased, TrajectoryReady, Wake
from algorithms.runtime.roles import ACTOR, LEARNER, POLICY_WORKER

ROLE = replace(POLICY_WORKER, name="gradient", worker="gradient_{index}.{member}", takes_trajectories=True)


class GradientWorker:
    def __init__(self, address, learner, trajectories, acting, ring):
        self.actor, self.learner, self.trajectories, self.acting = address.member, learner, trajectories, acting
        self.ring, self.queue, self.ledger = ring, deque(), LearnerLedger(trajectories, address.index)

    def handle(self, message):
        if isinstance(message, TrajectoryReady) and self.ledger.accept(message):
            weights = self.acting.weights
            version = weights.version or weights.refresh()  # a successor has not acted yet
            self.queue.append((message, version, weights.flat.flat.clone()))  # those that acted
        yield from ()

    def pending(self):
        return bool(self.queue) and self.ring.has_room(self.actor)

    def work(self):
        message, version, weights = self.queue.popleft()
        if not self.ring.holds(self.actor, message.slot, message.sequence):
            self.learner.flat.flat.copy_(weights)
            self.learner.differentiate(batch := cleaned(Batch.of_slot(self.trajectories, message.slot)))
            self.ring.commit(self.actor, self.learner.optimizer.gradient.numpy(), batch, message, version)
        self.ledger.release(release := SlotReleased(message.policy, message.slot, message.sequence))
        yield from (release, Wake(Address(LEARNER.name, message.policy)))


class ApplyingLearner(Learner):
    def learn(self, batch, progress):
        self.optimizer.follow(progress)
        self.optimizer.gradient.copy_(batch.recorded[GRADIENT][: self.flat.num_parameters])
        self.optimizer.step(batch.valid.any(), torch.zeros(()))
        self.updates, self.version = self.updates + 1, self.version + 1
        yield


class Gradients(APPO):
    whole_rollouts = True
    ring = GradientRing

    def learner_class(self):
        return ApplyingLearner

    def fields(self, context, topology, num_weights):
        return GradientRing.declare(0, topology.num_actors, num_weights)

    def workers(self, topology):
        return {ROLE: ACTOR}

    def make_worker(self, address, context, trajectories, others):
        learner = APPO().make_learner(context, self.make_model(context), None)
        acting = others[Address(POLICY_WORKER.name, address.index, address.member)]
        return GradientWorker(address, learner, trajectories, acting, self.ring(context.arena, address.index))

    def make_source(self, context, trajectories, sampling, device):
        ring, block = self.ring(context.arena, context.policy), StateBlock(context.arena, context.policy)
        return GradientSource(ring, context.policy, trajectories, block, ROLE)
