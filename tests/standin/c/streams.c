/* Streams and events: work is done in order, as far as it can be, whenever the process calls CUDA.

   Nothing runs by itself. What waits (a collective that others have not entered, an event, a kernel that takes its time)
   holds up its stream, and is looked at again with every call; torch's watchdog thread queries events ten times a second. */
#include "standin.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

struct stream {
    int device, priority;
    struct work *first, *last;
    struct stream *next;
    bool released;
};

struct event {
    long recorded, done; /* how often */
    double when;
    bool released;
};

struct event_work {
    struct work base;
    struct event *event;
    long ticket;
};

__thread int current_device = 0;
static __thread cudaError_t last_error;
static cudaError_t met, told; /* an error that sticks: met by a kernel; known to the host */
static struct stream defaults[MOST_DEVICES];
static struct stream *streams;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

cudaError_t remember(cudaError_t error) {
    if (error) last_error = error;
    return error;
}

cudaError_t sticky_error(bool look) {
    if (look && met) told = met;
    return told;
}

void fail_for_good(cudaError_t error) {
    if (!met) {
        met = error;
        tell("error %d, which sticks", (int)error);
    }
}

struct stream *stream_of(cudaStream_t handle) {
    if (handle != NULL && handle != cudaStreamLegacy && handle != cudaStreamPerThread) return (struct stream *)handle;
    defaults[current_device].device = current_device;
    return &defaults[current_device];
}

int device_of(const struct stream *stream) { return stream->device; }

static void advance(struct stream *stream) {
    while (stream->first && !met) {
        struct work *work = stream->first;
        if (work->ready && !work->ready(work)) return;
        stream->first = work->next;
        if (!stream->first) stream->last = NULL;
        work->execute(work);
        free(work);
    }
}

static void advance_all(void) {
    for (int round = 0; round < 2; round++) { /* twice, because one may have waited for an event of another */
        for (int i = 0; i < visible_count(); i++) advance(&defaults[i]);
        for (struct stream **at = &streams; *at;) {
            struct stream *stream = *at;
            advance(stream);
            if (stream->released && !stream->first) {
                *at = stream->next;
                free(stream);
            } else {
                at = &stream->next;
            }
        }
    }
}

static bool busy(struct stream *only) {
    if (only) return only->first != NULL;
    for (int i = 0; i < visible_count(); i++)
        if (defaults[i].first) return true;
    for (struct stream *stream = streams; stream; stream = stream->next)
        if (stream->first) return true;
    return false;
}

void submit(struct stream *stream, struct work *work) {
    work->next = NULL;
    pthread_mutex_lock(&lock);
    if (stream->last)
        stream->last->next = work;
    else
        stream->first = work;
    stream->last = work;
    advance(stream);
    pthread_mutex_unlock(&lock);
}

/* Wait until `done(what)`, or an error; tells once that it waits. */
static cudaError_t wait_until(bool (*done)(void *), void *what, const char *caller) {
    struct timespec pause = {0, 200000};
    for (bool first = true;; first = false) {
        pthread_mutex_lock(&lock);
        advance_all();
        bool finished = done(what);
        pthread_mutex_unlock(&lock);
        if (sticky_error(true)) return sticky_error(true);
        if (finished) return cudaSuccess;
        if (first) tell("%s waits", caller);
        nanosleep(&pause, NULL);
        if (pause.tv_nsec < 2000000) pause.tv_nsec *= 2;
    }
}

static bool idle(void *stream) { return !busy(stream); }

cudaError_t wait_for(struct stream *stream, const char *caller) { return wait_until(idle, stream, caller); }

/* --- streams --- */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned flags UNUSED, int priority) {
    NEEDS_CONTEXT;
    struct stream *stream = calloc(1, sizeof *stream);
    stream->device = current_device;
    stream->priority = priority;
    pthread_mutex_lock(&lock);
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&lock);
    *handle = (cudaStream_t)stream;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *handle, unsigned flags) {
    return cudaStreamCreateWithPriority(handle, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    ((struct stream *)handle)->released = true;
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *priority) {
    *priority = stream_of(handle)->priority;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    NEEDS_CONTEXT;
    RETURN(wait_for(stream_of(handle), __func__));
}

cudaError_t cudaDeviceSynchronize(void) {
    NEEDS_CONTEXT;
    RETURN(wait_for(NULL, __func__));
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
    NEEDS_CONTEXT;
    pthread_mutex_lock(&lock);
    advance_all();
    bool waits = busy(stream_of(handle));
    pthread_mutex_unlock(&lock);
    if (sticky_error(true)) RETURN(sticky_error(true));
    return waits ? cudaErrorNotReady : cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle UNUSED, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle UNUSED, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph UNUSED,
                                     const cudaGraphNode_t **dependencies UNUSED, const cudaGraphEdgeData **edges UNUSED,
                                     size_t *count) {
    if (status) *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    if (count) *count = 0;
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode UNUSED) { return cudaSuccess; }

/* --- events --- */

static bool event_passed(struct work *work) {
    struct event_work *wait = (struct event_work *)work;
    return wait->event->done >= wait->ticket;
}

static void event_happens(struct work *work) {
    struct event_work *record = (struct event_work *)work;
    if (record->ticket > record->event->done) record->event->done = record->ticket;
    record->event->when = seconds();
}

static void nothing(struct work *work UNUSED) {}

/* Events are never given back to the heap: work that is queued may refer to them, and they are small. */
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *handle, unsigned flags UNUSED) {
    NEEDS_CONTEXT;
    *handle = (cudaEvent_t)calloc(1, sizeof(struct event));
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *handle) { return cudaEventCreateWithFlags(handle, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    ((struct event *)handle)->released = true;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t on) {
    NEEDS_CONTEXT;
    struct event_work *work = calloc(1, sizeof *work);
    work->base.execute = event_happens;
    work->event = (struct event *)handle;
    work->ticket = ++work->event->recorded;
    submit(stream_of(on), &work->base);
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t on, unsigned flags UNUSED) {
    return cudaEventRecord(handle, on);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t on, cudaEvent_t handle, unsigned flags UNUSED) {
    NEEDS_CONTEXT;
    struct event *event = (struct event *)handle;
    if (event->done >= event->recorded) return cudaSuccess;
    struct event_work *work = calloc(1, sizeof *work);
    work->base.ready = event_passed;
    work->base.execute = nothing;
    work->event = event;
    work->ticket = event->recorded;
    submit(stream_of(on), &work->base);
    return cudaSuccess;
}

static bool event_done(void *event) { return ((struct event *)event)->done >= ((struct event *)event)->recorded; }

cudaError_t cudaEventQuery(cudaEvent_t handle) {
    pthread_mutex_lock(&lock);
    advance_all();
    bool done = event_done(handle);
    pthread_mutex_unlock(&lock);
    if (sticky_error(true)) RETURN(sticky_error(true));
    return done ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    NEEDS_CONTEXT;
    RETURN(wait_until(event_done, handle, __func__));
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    if (!event_done(begin) || !event_done(end)) RETURN(cudaErrorNotReady);
    *milliseconds = (float)((((struct event *)end)->when - ((struct event *)begin)->when) * 1e3);
    return cudaSuccess;
}

/* --- functions of the host in a stream --- */

struct host_work {
    struct work base;
    cudaHostFn_t function;
    void *argument;
};

static void call_host(struct work *work) { ((struct host_work *)work)->function(((struct host_work *)work)->argument); }

cudaError_t cudaLaunchHostFunc(cudaStream_t on, cudaHostFn_t function, void *argument) {
    NEEDS_CONTEXT;
    struct host_work *work = calloc(1, sizeof *work);
    work->base.execute = call_host;
    work->function = function;
    work->argument = argument;
    submit(stream_of(on), &work->base);
    return cudaSuccess;
}

/* --- errors --- */

cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = told; /* what sticks comes again */
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }
