/* The clock of a machine that is CLOCK_SHIFT seconds off: `LD_PRELOAD` of a process. The monotonic clock is not. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long shift(void) {
  const char *seconds = getenv("CLOCK_SHIFT");
  return seconds ? atol(seconds) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int result = syscall(SYS_clock_gettime, clock, now);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += shift();
  return result;
}

time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}

int gettimeofday(struct timeval *out, void *zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  out->tv_sec = now.tv_sec;
  out->tv_usec = now.tv_nsec / 1000;
  return 0;
}

/* A limit that the kernel compares with its own clock. One of the monotonic clock is a small number. */
static struct timespec of_kernel(struct timespec limit) {
  if (limit.tv_sec > 1000000000) limit.tv_sec -= shift();
  return limit;
}

int sem_timedwait(sem_t *semaphore, const struct timespec *limit) {
  int (*next)(sem_t *, const struct timespec *) = dlsym(RTLD_NEXT, "sem_timedwait");
  struct timespec other = of_kernel(*limit);
  return next(semaphore, &other);
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *limit) {
  int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *) = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
  struct timespec other = of_kernel(*limit);
  return next(condition, mutex, &other);
}
